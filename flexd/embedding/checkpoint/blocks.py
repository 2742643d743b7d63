"""Convert between homes (rows of a table dealt out to the ranks of its rule) and one block of rows a rank.

Homes are cyclic, so that popular rows spread; a checkpoint has contiguous rows, so that it is valid for any number of
ranks and any sharding type. Arithmetic determines which rows a rank sends to another, so only values are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexd.core.homes import HomeRun, Homes
from flexd.embedding import devices
from flexd.embedding.exchange.collectives import Peers

if TYPE_CHECKING:
    from flexd.embedding.store.slow.tier import RowColumn

MAX_WINDOW_BYTES = 32 * 2**20
"""Bytes that each rank sends at once, and receives at once."""


@dataclass(frozen=True)
class TableHomes:
    """Homes and blocks of the rows of one table.

    Attributes:
        rank: this rank.
    """

    homes: Homes
    table: int
    rank: int

    @property
    def rows(self) -> int:
        return self.homes.keyspace.tables[self.table].rows

    @property
    def first_key(self) -> int:
        """Key of row 0."""
        return int(self.homes.keyspace.first_key[self.table])

    @property
    def world_size(self) -> int:
        return self.homes.layout.world_size

    @property
    def spread(self) -> bool:
        """True if the rows are dealt out over all ranks."""
        return self.homes.rules[self.table].spread

    @property
    def sharing(self) -> int:
        """Ranks that share the rows."""
        return self.homes.part_of(self.table).span

    @property
    def block_rows(self) -> int:
        """Rows of every block but the last ones, equal to those of ``torch.chunk`` and DTensor's ``Shard``."""
        return -(-self.rows // self.world_size)

    def block(self, rank: int) -> range:
        return range(min(rank * self.block_rows, self.rows), min((rank + 1) * self.block_rows, self.rows))

    def window(self, rank: int, number: int, window_rows: int) -> range:
        """Return the rows of the ``number``-th window of a rank's block."""
        return self.block(rank)[number * window_rows : (number + 1) * window_rows]

    def run(self, rows: range) -> HomeRun:
        """Return those of a contiguous range of rows that have their home here, ascending."""
        return self.homes.run(self.table, self.rank, rows)

    def count(self, rank: int, rows: range) -> int:
        """Return how many of a contiguous range of rows have their home on a rank."""
        return len(self.homes.run(self.table, rank, rows).rows)

    def most_rows(self, rows: range) -> int:
        """Return how many of a contiguous range of rows a rank has at most, equal on all ranks."""
        return -(-len(rows) // self.sharing)

    def read(self, held: RowColumn, rows: range) -> torch.Tensor:
        """Return [n, c] of the rows of ``run``; ``held`` is [slots, c]."""
        return held[self.run(rows).slots]

    def write(self, held: RowColumn, rows: range, values: torch.Tensor) -> None:
        """Write [n, c] of the rows of ``run``; the inverse of ``read``."""
        held[self.run(rows).slots] = values

    def write_table(self, held: RowColumn, first_row: int, values: torch.Tensor) -> None:
        """Write those of [n, c] rows from ``first_row`` on that have their home here."""
        run = self.run(range(first_row, first_row + values.shape[0]))
        if run.rows:
            mine = values[run.rows.start - first_row : run.rows.stop - first_row : run.rows.step]
            held[run.slots] = mine.to(held.device, held.dtype)

    def rows_and_slots(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 [n] rows of the table that have their home here, ascending, and int64 [n] their slots."""
        run = self.run(range(self.rows))
        rows = torch.arange(run.rows.start, run.rows.stop, run.rows.step, device=device)
        return rows, torch.arange(run.slots.start, run.slots.stop, device=device)

    def home_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Map int64 [n] rows to int64 [n] home ranks."""
        part = self.homes.part_of(self.table)
        return (rows + self.first_key) % part.span + part.first_rank


def to_block(world: Peers, homes: TableHomes, held: RowColumn, device: torch.device) -> torch.Tensor:
    """Collective. Return the rows of this rank's block, [block, c] on ``device``. ``held`` is [slots, c]."""
    width = held.shape[1]
    block = torch.empty((len(homes.block(homes.rank)), width), dtype=held.dtype, device=device)
    window_rows, windows = _windows(homes, held)
    for number in range(windows):
        slots, to_blocks = _homed_rows(homes, number, window_rows, held.device)
        order, from_homes = _window_rows(homes, number, window_rows, held.device)
        received = world.all_to_all(
            held.index_select(0, slots).view(-1),
            [count * width for count in to_blocks],
            [count * width for count in from_homes],
        )
        window = held.new_empty((len(order), width)).index_copy_(0, order, received.view(-1, width))
        block[number * window_rows : number * window_rows + len(order)] = window.to(device)
    return block


def from_block(world: Peers, homes: TableHomes, block: torch.Tensor, held: RowColumn) -> None:
    """Collective. Write the blocks of all ranks into ``held``; inverse of ``to_block``."""
    width = held.shape[1]
    window_rows, windows = _windows(homes, held)
    for number in range(windows):
        slots, from_blocks = _homed_rows(homes, number, window_rows, held.device)
        order, to_homes = _window_rows(homes, number, window_rows, held.device)
        window = block[number * window_rows : number * window_rows + len(order)].to(held.device)
        received = world.all_to_all(
            window.index_select(0, order).view(-1),
            [count * width for count in to_homes],
            [count * width for count in from_blocks],
        )
        held.index_copy_(0, slots, received.view(-1, width))


def _homed_rows(
    homes: TableHomes, number: int, window_rows: int, device: torch.device
) -> tuple[torch.Tensor, list[int]]:
    """Return (int64 slots of this rank's home rows in the ``number``-th windows of all blocks, ascending; how many are
    in the window of each rank)."""
    rows, slots = homes.rows_and_slots(device)
    blocks = torch.div(rows, homes.block_rows, rounding_mode="floor")
    windows = torch.div(rows - blocks * homes.block_rows, window_rows, rounding_mode="floor")
    chosen = (windows == number).nonzero().view(-1)
    counts = devices.sum_by_place(blocks.index_select(0, chosen), None, homes.world_size)
    return slots.index_select(0, chosen), counts.tolist()


def _window_rows(
    homes: TableHomes, number: int, window_rows: int, device: torch.device
) -> tuple[torch.Tensor, list[int]]:
    """Return (int64 places of the rows of this rank's ``number``-th window, ordered by their homes; how many have each
    home)."""
    window = homes.window(homes.rank, number, window_rows)
    rows = torch.arange(window.start, window.stop, device=device)
    order, counts = devices.ordered(homes.home_of(rows), homes.world_size)
    return order, counts.tolist()


def _windows(homes: TableHomes, held: RowColumn) -> tuple[int, int]:
    """Return (rows of a window, windows of a block), equal on all ranks."""
    rows = max(1, MAX_WINDOW_BYTES // max(1, held.shape[1] * held.element_size()))
    return rows, -(-homes.block_rows // rows)
