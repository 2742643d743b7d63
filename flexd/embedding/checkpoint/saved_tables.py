"""The tensors of a checkpoint: their names and shapes, and which rank saves which."""

from __future__ import annotations

from dataclasses import dataclass

from flexd.core.keyspace import TableSpec, state_columns
from flexd.embedding.checkpoint.blocks import TableHomes
from flexd.embedding.checkpoint.owners import assign_owners
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.store.slow.tier import RowColumn, TieredColumn
from flexd.embedding.store.store import GroupStore

_WEIGHT = "embeddings.{table}.weight"
_STATE = "optimizer.{optimizer}.{table}.{column}"
_FINGERPRINT = "fingerprint.{table}"


@dataclass(frozen=True)
class Column:
    """One tensor of a checkpoint: the rows of a table, or one part of their optimizer state."""

    key: str
    spec: TableSpec
    homes: TableHomes
    held: RowColumn
    """[slots, c], a view into this rank's store."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.spec.rows, self.held.shape[1]

    @property
    def nbytes(self) -> int:
        return self.spec.rows * self.held.shape[1] * self.held.element_size()


@dataclass(frozen=True)
class SavedTable:
    """Tensors of one table, the weights first.

    Attributes:
        number: place of the table among all.
        owner: the rank that saves it; None if all ranks save blocks of it.
    """

    number: int
    columns: list[Column]
    owner: int | None

    @property
    def spec(self) -> TableSpec:
        return self.columns[0].spec

    @property
    def homes(self) -> TableHomes:
        return self.columns[0].homes

    @property
    def held(self) -> list[RowColumn]:
        """[slots, c] of each column in this rank's store."""
        return [column.held for column in self.columns]

    @property
    def fingerprint_key(self) -> str:
        return _FINGERPRINT.format(table=self.spec.name)

    @property
    def is_mine(self) -> bool:
        """True if this rank saves the whole table."""
        return self.owner == self.homes.rank

    @property
    def has_fingerprint(self) -> bool:
        """True if the state of this rank has the fingerprint: that of one rank has it."""
        return self.is_mine if self.owner is not None else self.homes.rank == self.number % self.homes.world_size

    @property
    def first_row(self) -> int:
        """First row of the part that this rank saves."""
        return self.homes.block(self.homes.rank).start if self.owner is None else 0


def saved_tables(collection: EmbeddingCollection) -> list[SavedTable]:
    """Return the tables dim-group by dim-group, and which rank saves each."""
    groups = collection.engine.stores
    tables = [_columns(collection, store, table) for store in groups for table in store.group.tables]
    owners = assign_owners(
        [sum(column.nbytes for column in columns) for columns in tables], collection.layout.world_size
    )
    return [SavedTable(i, columns, owner) for i, (columns, owner) in enumerate(zip(tables, owners, strict=True))]


def _columns(collection: EmbeddingCollection, store: GroupStore, table: int) -> list[Column]:
    spec = collection.keyspace.tables[table]
    homes = TableHomes(collection.engine.homes, table, collection.rank)
    columns = [Column(_WEIGHT.format(table=spec.name), spec, homes, store.rows)]
    widths = state_columns(spec.optimizer, spec.dim)
    first = 0
    for name, width in widths.items():
        state = store.state
        part = state.narrow(first, width) if isinstance(state, TieredColumn) else state.narrow(1, first, width)
        key = _STATE.format(optimizer=spec.optimizer, table=spec.name, column=name)
        columns.append(Column(key, spec, homes, part))
        first += width
    return columns
