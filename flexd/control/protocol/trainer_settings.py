"""What a trainer says of itself when it registers, so that the daemon's configuration need not say it again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from flexd.core.keyspace import TableSpec


@dataclass(frozen=True)
class TrainerSettings:
    """How the collections of a job were constructed; equal on all its ranks.

    Attributes:
        exchange, comm_dtype: as in ``flexd.EmbeddingCollection``. A rank of another version may have
            other values.
        pooled: tables whose look-ups are pooled, as a hexadecimal number whose bit i stands for table i; "" for none.
        at_owner: those of them that are pooled at the owner, in the same way.
    """

    exchange: str = ""
    comm_dtype: str | None = None
    pooled: str = ""
    at_owner: str = ""

    def fault(self, table_count: int) -> str:
        """Return what cannot be; empty if nothing."""
        for name in ("pooled", "at_owner"):
            try:
                bits = _bits(getattr(self, name), table_count)
            except ValueError:
                bits = -1
            if bits < 0 or bits >> table_count:
                return f"{name} is no set of {table_count} tables"
        return ""

    def pooling_at_by_table(self, tables: Sequence[TableSpec]) -> dict[str, str]:
        """Return "requester" or "owner" by name of each pooled table."""
        pooled, at_owner = _bits(self.pooled, len(tables)), _bits(self.at_owner, len(tables))
        return {
            table.name: "owner" if at_owner >> number & 1 else "requester"
            for number, table in enumerate(tables)
            if pooled >> number & 1
        }


def table_bits(tables: Sequence[TableSpec], names: Collection[str]) -> str:
    """Return the tables with these names as ``TrainerSettings`` has them."""
    bits = sum(1 << number for number, table in enumerate(tables) if table.name in names)
    return f"{bits:x}" if bits else ""


def with_pooling(
    settings: TrainerSettings, tables: Sequence[TableSpec], pooling_at: Mapping[str, str]
) -> TrainerSettings:
    """Return the settings with "requester" or "owner" by name of each pooled table."""
    at_owner = {name for name, place in pooling_at.items() if place == "owner"}
    return replace(settings, pooled=table_bits(tables, pooling_at), at_owner=table_bits(tables, at_owner))


def _bits(text: str, table_count: int) -> int:
    """Raises ValueError: no number, or longer than so many tables need."""
    if len(text) > table_count // 4 + 1:
        raise ValueError("too long")
    return int(text, 16) if text else 0
