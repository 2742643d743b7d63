"""Between homes and blocks: rows of a table dealt cyclically over the ranks, and the same rows in one block a rank.

Homes are cyclic, so that popular rows spread; storage wants contiguous rows, so that a checkpoint means the same to any
number of ranks. Which rows a rank sends another is arithmetic: nothing but values travels, and the rows of one home in
a window of a block stand in consecutive slots there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexd.embedding.exchange.collectives import Peers

MAX_WINDOW_BYTES = 32 * 2**20
"""Sent and received at once by each rank, each."""


@dataclass(frozen=True)
class TableHomes:
    """Where the rows of one table are.

    Attributes:
        first_key: of the table's row 0.
        first_home_key: at slot 0 of this rank (``GroupStore.first_home_key``).
    """

    rows: int
    first_key: int
    first_home_key: int
    world_size: int
    rank: int

    @property
    def block_rows(self) -> int:
        """Rows of every block but the last ones, as ``torch.chunk`` and DTensor's ``Shard`` cut."""
        return -(-self.rows // self.world_size)

    def block(self, rank: int) -> range:
        return range(min(rank * self.block_rows, self.rows), min((rank + 1) * self.block_rows, self.rows))

    def window(self, rank: int, number: int, window_rows: int) -> range:
        """Rows of the ``number``-th window of a rank's block."""
        return self.block(rank)[number * window_rows : (number + 1) * window_rows]

    def homed(self, rank: int, rows: range) -> range:
        """The rows, of a stretch, whose home is ``rank``."""
        first = rows.start + (rank - self.first_key - rows.start) % self.world_size
        return range(min(first, rows.stop), rows.stop, self.world_size)

    def slots(self, homed: range) -> slice:
        """Where this rank has ``homed`` rows of its own."""
        start = (self.first_key + homed.start - self.first_home_key) // self.world_size
        return slice(start, start + len(homed))


def to_block(world: Peers, homes: TableHomes, held: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Collective. Of ``held`` [slots, c] the rows of this rank's block, [block, c] on ``device``."""
    width = held.shape[1]
    block = torch.empty((len(homes.block(homes.rank)), width), dtype=held.dtype, device=device)
    window_rows, windows = _windows(homes, held)
    everyone = range(homes.world_size)
    for number in range(windows):
        mine = homes.window(homes.rank, number, window_rows)
        going = [homes.homed(homes.rank, homes.window(rank, number, window_rows)) for rank in everyone]
        coming = [homes.homed(rank, mine) for rank in everyone]
        got = world.all_to_all(
            torch.cat([held[homes.slots(rows)].reshape(-1) for rows in going]),
            [len(rows) * width for rows in going],
            [len(rows) * width for rows in coming],
        )
        window = held.new_empty((len(mine), width))
        for rows, part in zip(coming, torch.split(got.view(-1, width), [len(r) for r in coming]), strict=True):
            window[_places(rows, mine)] = part
        block[number * window_rows : number * window_rows + len(mine)] = window.to(device)
    return block


def from_block(world: Peers, homes: TableHomes, block: torch.Tensor, held: torch.Tensor) -> None:
    """Collective. Inverse of ``to_block`` into ``held``."""
    width = held.shape[1]
    window_rows, windows = _windows(homes, held)
    everyone = range(homes.world_size)
    for number in range(windows):
        mine = homes.window(homes.rank, number, window_rows)
        window = block[number * window_rows : number * window_rows + len(mine)].to(held.device)
        going = [homes.homed(rank, mine) for rank in everyone]
        coming = [homes.homed(homes.rank, homes.window(rank, number, window_rows)) for rank in everyone]
        got = world.all_to_all(
            torch.cat([window[_places(rows, mine)].reshape(-1) for rows in going]),
            [len(rows) * width for rows in going],
            [len(rows) * width for rows in coming],
        )
        for rows, part in zip(coming, torch.split(got.view(-1, width), [len(r) for r in coming]), strict=True):
            held[homes.slots(rows)] = part


def _windows(homes: TableHomes, held: torch.Tensor) -> tuple[int, int]:
    """(rows of a window, windows of a block), equal on all ranks."""
    rows = max(1, MAX_WINDOW_BYTES // max(1, held.shape[1] * held.element_size()))
    return rows, -(-homes.block_rows // rows)


def _places(rows: range, window: range) -> slice:
    """Of ``rows`` in a window that holds them."""
    return slice(rows.start - window.start, rows.stop - window.start, rows.step)
