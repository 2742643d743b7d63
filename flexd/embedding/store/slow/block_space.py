"""Which blocks of a log hold rows that are still valid, and how many each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_WINDOW = 4096
"""Blocks that a search looks at, at least."""
_CHOICES = 16
"""Cleaning takes the emptiest of so many blocks for each that it is to free: near to the emptiest of all (Mitzenmacher:
The power of two choices, 2001; Desnoyers: Analytic models of SSD write performance, ACM TOS 2014), without a search of
all."""


class BlockSpace:
    """Counts of valid rows by block; a block without one is free.

    Args:
        per_block: rows that a block holds, at most 255.
    """

    def __init__(self, blocks: int, per_block: int) -> None:
        self._valid = np.zeros(blocks, dtype=np.uint8)
        self._per_block = per_block
        self._next_free = self._next_cleaned = 0
        self.free = blocks

    @property
    def nbytes(self) -> int:
        return self._valid.nbytes

    def allocate(self, counts: Int64Array) -> Int64Array:
        """Return int64 [n] ascending free blocks, which hold int64 [n] rows each from now on, all above 0.

        Adjoining blocks where there are some. The caller has checked ``free``.
        """
        if len(counts) > self.free:
            raise AssertionError(f"{self.free} free blocks, not {len(counts)}")
        found: list[Int64Array] = []
        missing, width = len(counts), max(_WINDOW, 4 * len(counts))
        while missing:
            window = self._valid[self._next_free : self._next_free + width]
            free = np.flatnonzero(window == 0)[:missing] + self._next_free
            missing -= len(free)
            found.append(free)
            self._next_free = int(free[-1]) + 1 if not missing else self._next_free + len(window)
            if self._next_free >= len(self._valid):
                self._next_free = 0
        blocks = np.sort(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)
        self._valid[blocks] = counts
        self.free -= len(blocks)
        return blocks

    def drop(self, blocks: Int64Array) -> None:
        """Note that a row of each of int64 [n] blocks, repeats allowed, is valid no more."""
        distinct, counts = np.unique(blocks, return_counts=True)
        self._valid[distinct] -= counts.astype(np.uint8)
        self.free += int((self._valid[distinct] == 0).sum())

    def to_clean(self, gain: int) -> Int64Array:
        """Return int64 ascending blocks of few valid rows: with these packed together, ``gain`` more blocks are free,
        or as many as can be."""
        width, blocks = max(_WINDOW, _CHOICES * gain), len(self._valid)
        while True:
            width = min(width, blocks)
            numbers = (self._next_cleaned + np.arange(width)) % blocks
            valid = self._valid[numbers].astype(np.int64)
            some = np.flatnonzero((valid > 0) & (valid < self._per_block))
            some = some[np.argsort(valid[some], kind="stable")]
            packed = -(-np.cumsum(valid[some]) // self._per_block)
            gains = np.arange(1, len(some) + 1) - packed
            enough = int(np.searchsorted(gains, gain))
            if enough < len(some) or width == blocks:
                self._next_cleaned = (self._next_cleaned + width) % blocks
                return np.sort(numbers[some[: enough + 1]])
            width *= 4
