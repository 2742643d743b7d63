"""``flexd.TableRules``: sharding type and pooling place of every table, as ``flexd shard --for flexd`` planned them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from flexd.core.errors import EmbeddingError, TopologyError
from flexd.core.placement import RankLayout
from flexd.core.sharding_types import DOCUMENT_FORMAT, ShardingType

_AGAIN = "write it by flexd shard --for flexd"
_Table = TypeVar("_Table", bound=Any)


@dataclass(frozen=True)
class TableRule:
    """The plan of one table.

    Attributes:
        rows, dim: of the table that was planned.
        sharding: sharding type, as of ``EmbeddingTable``.
        pooling_at: "requester" or "owner"; None if the table was planned un-pooled.
    """

    rows: int
    dim: int
    sharding: str
    pooling_at: str | None


@dataclass(frozen=True)
class TableRules:
    """Sharding type and pooling place of tables, by name.

    ::

        rules = flexd.TableRules.read("rules.json")
        collection = flexd.EmbeddingBagCollection(rules.apply(tables))  # or rules="rules.json"
        tables = flexd.torchrec.replace(model, rules="rules.json")

    Attributes:
        layout: of the job that the plan is for.
        by_name: of each table by its name, and by ``module/name`` as ``flexd.torchrec.replace`` calls a table whose
            name another module before has.
        source: file, for messages.
    """

    layout: RankLayout
    by_name: Mapping[str, TableRule]
    source: str = "the table rules"

    @staticmethod
    def read(given: TableRules | Mapping[str, Any] | str | Path) -> TableRules:
        """Local. Return the rules of a file or document.

        Raises:
            EmbeddingError: it cannot be read, or is no document of ``flexd shard --for flexd``; names the table.
        """
        if isinstance(given, TableRules):
            return given
        source = "the table rules" if isinstance(given, Mapping) else str(given)
        if not isinstance(given, Mapping):
            try:
                given = json.loads(Path(given).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise EmbeddingError(f"{source}: cannot be read: {error}", remedy=_AGAIN) from error
        if not isinstance(given, Mapping) or given.get("for") != "flexd" or given.get("format") != DOCUMENT_FORMAT:
            raise EmbeddingError(f"{source}: no table rules of format {DOCUMENT_FORMAT}", remedy=_AGAIN)
        by_name: dict[str, TableRule] = {}
        try:
            layout = RankLayout(int(given["nodes"]), int(given["local_ranks"]))
            entries = list(given["tables"])
            for entry in entries:
                name, module = str(entry["name"]), str(entry.get("module", ""))
                rule = _rule(name, entry)
                by_name.setdefault(name, rule)
                if module:
                    by_name[f"{module}/{name}"] = rule
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise EmbeddingError(f"{source}: {type(error).__name__}: {error}", remedy=_AGAIN) from error
        return TableRules(layout, by_name, source)

    def apply(self, tables: Sequence[_Table]) -> list[_Table]:
        """Return ``EmbeddingTable``s and ``EmbeddingBagTable``s with the planned sharding types and pooling places,
        instead of theirs.

        The plan may have more tables.

        Raises:
            EmbeddingError: a table is not in the plan, is planned with other rows or dim, or un-pooled with sums.
        """
        return [self._applied(table) for table in tables]

    def _applied(self, table: _Table) -> _Table:
        rule = self.by_name.get(table.name)
        if rule is None:
            raise EmbeddingError(f"{self.source}: no table {table.name!r}", remedy="plan the tables of this job again")
        if (rule.rows, rule.dim) != (table.rows, table.dim):
            raise EmbeddingError(
                f"{self.source}: table {table.name!r} has {rule.rows} rows of {rule.dim}, here {table.rows} of "
                f"{table.dim}",
                remedy="plan the tables of this job again",
            )
        if hasattr(table, "pooling_at"):
            return replace(table, sharding=rule.sharding, pooling_at=rule.pooling_at or table.pooling_at)
        if rule.pooling_at == "owner":
            raise EmbeddingError(
                f"{self.source}: table {table.name!r} is planned as pooled, and is not",
                remedy="list it with bags 0, or make it a flexd.EmbeddingBagTable",
            )
        return replace(table, sharding=rule.sharding)

    def check_layout(self, layout: RankLayout) -> None:
        """Raise TopologyError if the job has other nodes or ranks than the plan is for."""
        if layout != self.layout:
            raise TopologyError(
                f"{self.source}: planned for {self.layout.nodes} nodes x {self.layout.local_ranks} ranks, this job has "
                f"{layout.nodes} x {layout.local_ranks}",
                remedy="plan again with --nodes and --local-ranks of this job",
            )


def _rule(name: str, entry: Mapping[str, Any]) -> TableRule:
    pooling_at = entry["pooling_at"]
    if pooling_at not in ("requester", "owner", None):
        raise ValueError(f"table {name!r}: pooling_at {pooling_at!r}")
    return TableRule(
        int(entry["rows"]), int(entry["dim"]), str(ShardingType.parse(str(entry["sharding"]), name)), pooling_at
    )
