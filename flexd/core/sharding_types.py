"""Sharding types, which ranks share the rows of a table, and whether the requester or the owner of rows pools bags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexd.core.errors import ConfigError, TopologyError

if TYPE_CHECKING:  # it imports numpy, which would double the time of a client command
    from flexd.core.placement import RankLayout

# Of what ``flexd shard`` writes: table rules, and TorchRec's sharding plans.
DOCUMENT_FORMAT = 1
# The type of a table that names none.
ROW_WISE = "row_wise"
# Rows are spread over all ranks, and every rank has a copy of each.
DATA_PARALLEL = "data_parallel"
_REMEDY = (
    f'"{ROW_WISE}" (spread over all ranks), "table_row_wise:N" (over the ranks of node N), "table_wise:R" (whole on '
    f'rank R) or "{DATA_PARALLEL}" (copied to each)'
)


@dataclass(frozen=True)
class ShardingType:
    """The ranks on which the home copies of a table's rows are, dealt in turn by key.

    Attributes:
        kind: "row_wise", "data_parallel", "table_row_wise" or "table_wise".
        number: of the node or rank; 0 for the others.
    """

    kind: str = ROW_WISE
    number: int = 0

    @staticmethod
    def parse(text: str, table: str = "") -> ShardingType:
        """Read "row_wise", "data_parallel", "table_row_wise:N" or "table_wise:R".

        Raises:
            ConfigError: anything else; names the table.
        """
        kind, colon, number = text.partition(":")
        if text in (ROW_WISE, DATA_PARALLEL):
            return ShardingType(text)
        if kind not in ("table_row_wise", "table_wise") or not colon or not (number.isascii() and number.isdigit()):
            where = f"table {table!r}: " if table else ""
            raise ConfigError(f"{where}sharding type {text!r}", remedy=_REMEDY)
        return ShardingType(kind, int(number))

    def __str__(self) -> str:
        return self.kind if self.spread else f"{self.kind}:{self.number}"

    @property
    def spread(self) -> bool:
        """True if the home copies are dealt out over all ranks."""
        return self.kind in (ROW_WISE, DATA_PARALLEL)

    @property
    def copied(self) -> bool:
        """True if every rank has a copy of each row."""
        return self.kind == DATA_PARALLEL

    def ranks(self, layout: RankLayout) -> range:
        """Return the ranks that share the rows.

        Raises:
            TopologyError: the job has no such node or rank.
        """
        if self.spread:
            return range(layout.world_size)
        most = layout.nodes if self.kind == "table_row_wise" else layout.world_size
        if self.number >= most:
            raise TopologyError(
                f"sharding type {self} in a job of {layout.nodes} nodes x {layout.local_ranks} ranks",
                remedy=f"give {self.kind}:N with N below {most}",
            )
        first = self.number * layout.local_ranks if self.kind == "table_row_wise" else self.number
        return range(first, first + (layout.local_ranks if self.kind == "table_row_wise" else 1))


REQUESTER, OWNER = "requester", "owner"


@dataclass(frozen=True)
class PooledTables:
    """The pooled tables of a trainer, and those of them that are pooled at the owner."""

    pooled: frozenset[int] = frozenset()
    at_owner: frozenset[int] = frozenset()


NO_POOLED = PooledTables()
