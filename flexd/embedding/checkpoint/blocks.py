"""Convert between homes (rows of a table distributed cyclically over the ranks) and one block of rows a rank.

Homes are cyclic, so that popular rows spread; a checkpoint has contiguous rows, so that it is valid for any number of
ranks. Arithmetic determines which rows a rank sends to another, so only values are sent, and the rows of one home in a
window of a block have consecutive slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexd.embedding import devices
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.store.slow.tier import RowColumn

MAX_WINDOW_BYTES = 32 * 2**20
"""Bytes that each rank sends at once, and receives at once."""


@dataclass(frozen=True)
class TableHomes:
    """Homes and blocks of the rows of one table.

    Attributes:
        first_key: key of the table's row 0.
        first_home_key: key at slot 0 of this rank (``GroupStore.first_home_key``).
    """

    rows: int
    first_key: int
    first_home_key: int
    world_size: int
    rank: int

    @property
    def block_rows(self) -> int:
        """Rows of every block but the last ones, equal to those of ``torch.chunk`` and DTensor's ``Shard``."""
        return -(-self.rows // self.world_size)

    def block(self, rank: int) -> range:
        return range(min(rank * self.block_rows, self.rows), min((rank + 1) * self.block_rows, self.rows))

    def window(self, rank: int, number: int, window_rows: int) -> range:
        """Return the rows of the ``number``-th window of a rank's block."""
        return self.block(rank)[number * window_rows : (number + 1) * window_rows]

    def homed(self, rank: int, rows: range) -> range:
        """Return those of a contiguous range of rows whose home is ``rank``."""
        first = rows.start + (rank - self.first_key - rows.start) % self.world_size
        return range(min(first, rows.stop), rows.stop, self.world_size)

    def slots(self, homed: range) -> slice:
        """Return the slots of ``homed`` rows of this rank."""
        start = (self.first_key + homed.start - self.first_home_key) // self.world_size
        return slice(start, start + len(homed))


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
    homed = homes.homed(homes.rank, range(homes.rows))
    rows = torch.arange(homed.start, homed.stop, homed.step, device=device)
    blocks = torch.div(rows, homes.block_rows, rounding_mode="floor")
    windows = torch.div(rows - blocks * homes.block_rows, window_rows, rounding_mode="floor")
    chosen = (windows == number).nonzero().view(-1)
    counts = devices.sum_by_place(blocks.index_select(0, chosen), None, homes.world_size)
    return chosen + homes.slots(homed).start, counts.tolist()


def _window_rows(
    homes: TableHomes, number: int, window_rows: int, device: torch.device
) -> tuple[torch.Tensor, list[int]]:
    """Return (int64 places of the rows of this rank's ``number``-th window, ordered by their homes; how many have each
    home)."""
    window = homes.window(homes.rank, number, window_rows)
    rows = torch.arange(window.start, window.stop, device=device)
    order, counts = devices.ordered((rows + homes.first_key) % homes.world_size, homes.world_size)
    return order, counts.tolist()


def _windows(homes: TableHomes, held: RowColumn) -> tuple[int, int]:
    """Return (rows of a window, windows of a block), equal on all ranks."""
    rows = max(1, MAX_WINDOW_BYTES // max(1, held.shape[1] * held.element_size()))
    return rows, -(-homes.block_rows // rows)
