"""The hash positions of Apache DataSketches, vectorised.

``MurmurHash3_x64_128`` (Appleby, public domain) of the 8 bytes of an id. The count-min sketch of DataSketches hashes
row i of its cells with ``seed + s_i``, where s_i are the first outputs of C++'s ``uniform_int_distribution<uint64>``
over ``default_random_engine(seed)``; the constants below are those of the library's default seed 9001. Its HyperLogLog
hashes with the seed itself: the low bits of the first half are the slot, and the leading zeros of the second half are
counted.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

SEED = 9001
"""DEFAULT_SEED of DataSketches."""
_SPREAD = (4480857443237077987, 6631161516192690341, 11350819014790085518, 4160660749069242171)
_MASK = 2**64 - 1
# Both halves of the state start as the seed; the length of the key, 8, is mixed into each.
_FIRST = tuple(np.uint64(((spread + SEED) & _MASK) ^ 8) for spread in _SPREAD)
_S0, _S1, _S2, _S3 = _FIRST
_DISTINCT = np.uint64(SEED ^ 8)
_33 = np.uint64(33)
_31 = np.uint64(31)


@numba.njit(cache=True, nogil=True, inline="always")
def _finalise(k: Any) -> Any:
    k = (k ^ (k >> _33)) * np.uint64(0xFF51AFD7ED558CCD)
    k = (k ^ (k >> _33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return k ^ (k >> _33)


@numba.njit(cache=True, nogil=True, inline="always")
def _premix(key: Any) -> Any:
    k = key * np.uint64(0x87C37B91114253D5)
    k = (k << _31) | (k >> _33)
    return k * np.uint64(0x4CF5AD432745937F)


@numba.njit(cache=True, nogil=True, inline="always")
def _first_half(k: Any, s: Any) -> Any:
    h1 = (s ^ k) + s
    return _finalise(h1) + _finalise(s + h1)


@numba.njit(cache=True, nogil=True)
def cell_positions(rows: Any, count: int, log2_width: int, positions: Any) -> None:
    """Write the positions of ``rows[:count]`` (int64, not negative) in the 4 x 2^k cells to uint32[4, >= count]."""
    width = np.uint64(1) << np.uint64(log2_width)
    mask = width - np.uint64(1)
    for i in range(count):
        k = _premix(np.uint64(rows[i]))
        positions[0, i] = np.uint32(_first_half(k, _S0) & mask)
        positions[1, i] = np.uint32((_first_half(k, _S1) & mask) + width)
        positions[2, i] = np.uint32((_first_half(k, _S2) & mask) + width + width)
        positions[3, i] = np.uint32((_first_half(k, _S3) & mask) + width + width + width)


@numba.njit(cache=True, nogil=True)
def distinct_halves(rows: Any, count: int, slots: Any, bits: Any) -> None:
    """Write both halves of the HyperLogLog hash of ``rows[:count]``: the low 16 bits of the first to uint16[>= count],
    the second to uint64[>= count]."""
    for i in range(count):
        k = _premix(np.uint64(rows[i]))
        h1 = (_DISTINCT ^ k) + _DISTINCT
        h2 = _DISTINCT + h1
        h1 = _finalise(h1)
        h2 = _finalise(h2)
        h1 = h1 + h2
        slots[i] = np.uint16(h1)
        bits[i] = h2 + h1
