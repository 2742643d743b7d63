"""Checksums of blocks of a file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15

UInt64Array = npt.NDArray[np.uint64]


class BlockSums:
    """Multilinear hash of the 64-bit words of a block after the first (Lemire, Kaser: Strongly universal string hashing
    is fast, 2014, section 3) with odd factors modulo 2^64, so that any one changed word changes it.

    Not zero for a block of zeros, which is a hole.
    """

    def __init__(self, block_bytes: int) -> None:
        # splitmix64's first round.
        mixed = np.arange(1, block_bytes // 8, dtype=np.uint64) * np.uint64(_GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        self._factors = (mixed ^ (mixed >> np.uint64(27))) | np.uint64(1)

    def of(self, words: UInt64Array) -> UInt64Array:
        """uint64 [n, words of a block] -> uint64 [n]."""
        sums: UInt64Array = words[:, 1:] @ self._factors
        return sums + np.uint64(_GOLDEN)

    def seal(self, words: UInt64Array) -> None:
        """Write the checksum of each block into its first word."""
        words[:, 0] = self.of(words)

    def wrong(self, words: UInt64Array) -> npt.NDArray[np.int64]:
        """Return int64, ascending: the blocks whose first word is not their checksum."""
        return np.flatnonzero(words[:, 0] != self.of(words))
