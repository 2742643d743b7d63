"""The tensors of a checkpoint: their names and shapes, and which rank saves which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexd.core.keyspace import TableSpec, state_columns
from flexd.embedding import devices
from flexd.embedding.checkpoint import blocks
from flexd.embedding.checkpoint.blocks import TableHomes
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.store.slow.tier import RowColumn, TieredColumn
from flexd.embedding.store.store import GroupStore

_WEIGHT = "embeddings.{table}.weight"
_STATE = "optimizer.{optimizer}.{table}.{column}"
_FINGERPRINT = "fingerprint.{table}"


def assign_owners(table_bytes: Sequence[int], world_size: int) -> list[int | None]:
    """Spread the tables evenly, by bytes, over owners in ascending order. None: too large for a window; it has none."""
    fits = [size <= blocks.MAX_WINDOW_BYTES for size in table_bytes]
    total = sum(size for size, owned in zip(table_bytes, fits, strict=True) if owned)
    owners: list[int | None] = []
    before = 0
    for size, owned in zip(table_bytes, fits, strict=True):
        owners.append(min(before * world_size // max(1, total), world_size - 1) if owned else None)
        before += size if owned else 0
    return owners


def to_owner(
    world: Peers, homes: TableHomes, columns: Sequence[RowColumn], owner: int, device: torch.device
) -> list[torch.Tensor] | None:
    """Collective. Return the whole columns of a table on ``device`` at its owner, None on the other ranks.

    Args:
        columns: [slots, c] of this rank.
    """
    is_mine, every = owner == homes.rank, range(homes.rows)
    packed = torch.cat([homes.read(column, every).contiguous().view(torch.uint8) for column in columns], dim=1)
    width = packed.shape[1]
    counts = [homes.count(rank, every) * width if is_mine else 0 for rank in range(world.size)]
    send = [packed.numel() if rank == owner else 0 for rank in range(world.size)]
    received = world.all_to_all(packed.view(-1), send, counts).view(-1, width)
    if not is_mine:
        return None
    order = devices.ordered(homes.home_of(torch.arange(homes.rows, device=received.device)), world.size)[0]
    whole = torch.empty_like(received).index_copy_(0, order, received)
    return [
        part.clone(memory_format=torch.contiguous_format).view(column.dtype).to(device)
        for part, column in zip(torch.split(whole, _row_bytes(columns), dim=1), columns, strict=True)
    ]


def from_owner(
    world: Peers, homes: TableHomes, columns: Sequence[RowColumn], owner: int, whole: Sequence[torch.Tensor] | None
) -> None:
    """Collective. Write the ``whole`` columns that the owner has to the homes; the inverse of ``to_owner``."""
    every, row_bytes, device = range(homes.rows), _row_bytes(columns), columns[0].device
    width = sum(row_bytes)
    mine = homes.count(homes.rank, every) * width
    send, counts = torch.empty(0, dtype=torch.uint8, device=device), [0] * world.size
    if whole is not None:
        given = [
            column.to(device, held.dtype).contiguous().view(torch.uint8)
            for column, held in zip(whole, columns, strict=True)
        ]
        order, of_homes = devices.ordered(homes.home_of(torch.arange(homes.rows, device=device)), world.size)
        send = torch.cat(given, dim=1).index_select(0, order).view(-1)
        counts = [number * width for number in of_homes.tolist()]
    received = world.all_to_all(send, counts, [mine if rank == owner else 0 for rank in range(world.size)])
    for part, held in zip(torch.split(received.view(-1, width), row_bytes, dim=1), columns, strict=True):
        homes.write(held, every, part.clone(memory_format=torch.contiguous_format).view(held.dtype))


def _row_bytes(columns: Sequence[RowColumn]) -> list[int]:
    return [column.shape[1] * column.element_size() for column in columns]


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
