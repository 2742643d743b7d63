"""Stable numbers for listed rows, equal on every rank that lists the same rows; changes cost what they change."""

from __future__ import annotations

from array import array

import numpy as np

from flexd.core.arrays import Int32Array, Int64Array, first_of_run

BLOCK = 64
"""Numbers of a block: one word of bits."""
_SLACK_BLOCKS = 16


class EntryPool:
    """Numbers the rows of one tier and dim-group, in blocks that each belong to one home rank.

    A row keeps its number while it is listed. Numbers depend on the sequence of changes alone, so ranks that list the
    same rows (all ranks at DEVICE, those of a rail at NODE) give them the same numbers and the same blocks, without
    sorting and without a message. The blocks of a home in ascending order are its rows in an order that all of them
    share.

    Args:
        homes: number of home ranks.
    """

    def __init__(self, homes: int) -> None:
        self._owners = np.empty(0, dtype=np.int32)
        self._free: dict[int, array[int]] = {}
        self._rows = np.zeros(homes, dtype=np.int64)
        self.blocks = 0
        """Blocks in use."""
        self.changes = 0
        """Times that the blocks, or the homes that they belong to, have changed."""

    def __len__(self) -> int:
        return int(self._rows.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the owners and of the free numbers."""
        return self._owners.nbytes + 4 * (self.blocks * BLOCK - len(self))

    @property
    def owners(self) -> Int32Array:
        """int32 [blocks] home of each block."""
        return self._owners[: self.blocks]

    def blocks_by_home(self) -> tuple[Int64Array, Int64Array]:
        """Return int64 [blocks] blocks ordered by home, and int64 [homes + 1] where the blocks of each home begin."""
        narrow = self.owners.astype(np.uint16) if len(self._rows) <= 2**16 else self.owners
        order = np.argsort(narrow, kind="stable")
        starts = np.zeros(len(self._rows) + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.owners, minlength=len(self._rows)), out=starts[1:])
        return order, starts

    def allocate(self, homes: Int64Array) -> Int32Array:
        """Return int32 [n] numbers for rows of int64 [n] homes."""
        numbers = np.empty(len(homes), dtype=np.int32)
        for home, at in _by_home(homes):
            free = self._free.setdefault(home, array("i"))
            missing = len(at) - len(free)
            if missing > 0:
                first, count = self.blocks, -(-missing // BLOCK)
                self._add_blocks(home, count)
                # In front of the others, and from the end, so that old numbers and then low ones are given first.
                free[:0] = array("i", range((first + count) * BLOCK - 1, first * BLOCK - 1, -1))
            numbers[at] = free[: -len(at) - 1 : -1]
            del free[len(free) - len(at) :]
            self._rows[home] += len(at)
        return numbers

    def release(self, numbers: Int32Array) -> None:
        """Free int32 [n] numbers, each once."""
        for home, at in _by_home(self._owners[numbers // BLOCK].astype(np.int64)):
            self._free[home].extend(numbers[at].tolist())
            self._rows[home] -= len(at)

    def compact(self) -> Int32Array | None:
        """Renumber all rows if more than half of the blocks could be saved: int32 [numbers before] -> number now, -1
        for a free one; None: nothing has changed. Takes time in proportion to the pool."""
        needed = -(-self._rows // BLOCK)
        if self.blocks <= 2 * int(needed.sum()) + _SLACK_BLOCKS:
            return None
        self.changes += 1
        used = np.ones(self.blocks * BLOCK, dtype=np.bool_)
        for free in self._free.values():
            used[np.array(free, dtype=np.int64)] = False
        before = np.flatnonzero(used)
        homes = self._owners[before // BLOCK]
        order = np.argsort(homes, kind="stable")
        first_rows, first_blocks = np.cumsum(self._rows) - self._rows, np.cumsum(needed) - needed
        of_row = homes[order]
        after = np.arange(len(order)) - first_rows[of_row] + first_blocks[of_row] * BLOCK
        moved = np.full(len(used), -1, dtype=np.int32)
        moved[before[order]] = after
        self._owners = np.repeat(np.arange(len(needed), dtype=np.int32), needed)
        self.blocks = len(self._owners)
        ends, rows = (np.cumsum(needed) * BLOCK).tolist(), self._rows.tolist()
        starts = (first_blocks * BLOCK).tolist()
        self._free = {
            home: array("i", range(end - 1, start + count - 1, -1))
            for home, (start, end, count) in enumerate(zip(starts, ends, rows, strict=True))
            if count
        }
        return moved

    def _add_blocks(self, home: int, count: int) -> None:
        self.changes += 1
        if self.blocks + count > len(self._owners):
            grown = np.empty(max(self.blocks + count, 2 * len(self._owners)), dtype=np.int32)
            grown[: self.blocks] = self._owners[: self.blocks]
            self._owners = grown
        self._owners[self.blocks : self.blocks + count] = home
        self.blocks += count


def _by_home(homes: Int64Array) -> list[tuple[int, Int64Array]]:
    """Return (home, int64 places of its rows in their order) of each home, ascending."""
    if len(homes) == 0:
        return []
    order = np.argsort(homes, kind="stable")
    ordered = homes[order]
    starts = np.flatnonzero(first_of_run(ordered))
    return list(zip(ordered[starts].tolist(), np.split(order, starts[1:]), strict=True))
