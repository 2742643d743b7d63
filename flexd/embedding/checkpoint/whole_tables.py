"""The tables of a collection as checkpoints of whole tables have them: which tensors, and which rank saves what.

A table that fits a window is saved by one rank (``owner``); of a larger one each rank saves a contiguous block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexd.core.keyspace import TableSpec
from flexd.embedding.checkpoint import table_rows
from flexd.embedding.checkpoint.table_rows import TableHomes
from flexd.embedding.store.slow.tiered_rows import RowColumn
from flexd.embedding.store.store import GroupStore

if TYPE_CHECKING:
    from flexd.embedding.collection import EmbeddingCollection


@dataclass(frozen=True)
class WholeTable:
    """Tensors of one table.

    Attributes:
        number: place of the table among all.
        columns: by their names in a checkpoint, the weights first: [slots, c] views into this rank's store.
        owner: the rank that saves it; None if all ranks save blocks of it.
        rows: that a checkpoint has of it.
        of_ids: whether unbounded ids have its rows.
    """

    number: int
    spec: TableSpec
    homes: TableHomes
    columns: Mapping[str, RowColumn]
    owner: int | None
    rows: int
    of_ids: bool = False

    @property
    def rows_by_rank(self) -> list[range]:
        """The rows that each rank saves."""
        return self.homes.blocks(self.rows) if self.owner is None else self.homes.only(self.owner, range(self.rows))

    @property
    def has_part(self) -> bool:
        """True if this rank saves rows, perhaps an empty block."""
        return self.owner in (None, self.homes.rank)

    @property
    def fingerprint_key(self) -> str:
        # A table whose ids are rows, and one of unbounded ids, must not load the rows of the other.
        return f"fingerprint.{self.spec.name}{' of unbounded ids' * self.of_ids}"

    @property
    def has_fingerprint(self) -> bool:
        """True if the state of this rank has the fingerprint: that of one rank has it."""
        return self.homes.rank == (self.number % self.homes.world_size if self.owner is None else self.owner)


def whole_tables(collection: EmbeddingCollection) -> list[WholeTable]:
    """Return the tables dim-group by dim-group, and which rank saves each: those that fit a window are spread evenly,
    by bytes, over owners in ascending order."""
    of_tables = [
        (table, _columns(store, collection.keyspace.tables[table]))
        for store in collection.engine.stores
        for table in store.group.tables
    ]
    row_bytes = [sum(held.shape[1] * held.element_size() for held in columns.values()) for _, columns in of_tables]
    sizes = [
        each * collection.keyspace.tables[table].rows for each, (table, _) in zip(row_bytes, of_tables, strict=True)
    ]
    total = max(1, sum(size for size in sizes if size <= table_rows.MAX_WINDOW_BYTES))
    world_size, before = collection.layout.world_size, 0
    tables = []
    for number, ((table, columns), size) in enumerate(zip(of_tables, sizes, strict=True)):
        owner = None
        if size <= table_rows.MAX_WINDOW_BYTES:
            owner = min(before * world_size // total, world_size - 1)
            before += size
        homes = TableHomes(collection.engine.homes, table, collection.rank)
        spec = collection.keyspace.tables[table]
        of_ids = spec.name in collection.engine.admit_after
        tables.append(WholeTable(number, spec, homes, columns, owner, homes.rows, of_ids))
    return tables


def _columns(store: GroupStore, spec: TableSpec) -> dict[str, RowColumn]:
    columns = {f"embeddings.{spec.name}.weight": store.rows}
    first = 0
    for name, width in store.group.state_columns.items():
        columns[f"optimizer.{spec.optimizer}.{spec.name}.{name}"] = store.state.narrow(1, first, width)
        first += width
    return columns
