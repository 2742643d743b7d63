"""The loops of the logarithmic counters: packed levels of 3, 4 or 8 bits, updated with a stream of random numbers.

The level of a row is in the ``bits`` bits from bit ``row * bits`` on, least significant first. A field of 3 bits may
cross a byte boundary, so the array has one spare byte. The i-th random number is SplitMix64 of ``seed + i``: the number
of ids is the whole state, and successive iterations are independent.
"""

from typing import Any

import numba
import numpy as np

from flexd.core.tap_counts import GAMMA
from flexd.sketch.kernel_parts import finalise


@numba.njit(cache=True, nogil=True, inline="always")
def _random(state: Any) -> Any:
    return finalise(np.uint64(state) * np.uint64(GAMMA))


@numba.njit(cache=True, nogil=True, inline="always")
def _level(packed: Any, bit: Any, mask: Any) -> Any:
    at = bit >> np.uint64(3)
    pair = np.uint64(packed[at]) | np.uint64(packed[at + np.uint64(1)]) << np.uint64(8)
    return (pair >> (bit & np.uint64(7))) & mask


@numba.njit(cache=True, nogil=True, inline="always")
def _put(packed: Any, bit: Any, mask: Any, level: Any) -> None:
    at = bit >> np.uint64(3)
    shift = bit & np.uint64(7)
    pair = np.uint64(packed[at]) | np.uint64(packed[at + np.uint64(1)]) << np.uint64(8)
    pair = (pair & ~(mask << shift)) | np.uint64(level) << shift
    packed[at] = np.uint8(pair)
    packed[at + np.uint64(1)] = np.uint8(pair >> np.uint64(8))


@numba.njit(cache=True, nogil=True, inline="always")
def _as_threshold(share: Any) -> Any:
    """Return the threshold below which a random number lies with probability ``share`` (all but one from 1 - 2^-53)."""
    if share <= 0.0:
        return np.uint64(0)
    if share >= 1.0 - 2.0**-53:
        return np.uint64(0xFFFFFFFFFFFFFFFF)
    return np.uint64(share * 2.0**64)


@numba.njit(cache=True, nogil=True, inline="always")
def _place(value: Any, values: Any, first: Any) -> tuple[Any, Any]:
    """Return (level at or below a value, probability of rounding up to the next), so that the mean is the value."""
    top = values.size - 1
    low = first
    while low < top and values[low + 1] <= value:
        low += 1
    if low == top:
        return low, 0.0
    return low, (value - values[low]) / (values[low + 1] - values[low])


@numba.njit(cache=True, nogil=True)
def _moves(old_values: Any, weight: float, values: Any) -> tuple[Any, Any]:
    """Return for each level, of which ``weight`` is added to the old value, (level at or below the sum, threshold of
    rounding up)."""
    to = np.empty(values.size, dtype=np.uint8)
    up = np.empty(values.size, dtype=np.uint64)
    first = np.int64(0)
    for c in range(values.size):
        first, up_share = _place(old_values[c] + weight, values, first)
        to[c] = first
        up[c] = _as_threshold(up_share)
    return to, up


@numba.njit(cache=True, nogil=True)
def add(
    rows: Any,
    start: int,
    end: int,
    table_rows: Any,
    packed: Any,
    counts: Any,
    bits: int,
    values: Any,
    weight: float,
    state: Any,
) -> tuple[int, int]:
    """Add ``weight`` (in the unit of ``values``) to every row of ``rows[start:end]``.

    ``counts``, the number of rows at each level, is updated.

    Returns:
        (ids below 0, ids beyond the table).
    """
    to, up = _moves(values, weight, values)
    mask = np.uint64(values.size - 1)
    wide = np.uint64(bits)
    negative = 0
    outside = 0
    number = np.uint64(state)
    if bits == 8:
        for i in range(start, end):
            row = rows[i]
            at = np.uint64(np.int64(row))
            number += np.uint64(1)
            if at < table_rows:
                level = packed[at]
                moved = to[level] + np.uint8(_random(number) < up[level])
                if moved != level:
                    packed[at] = moved
                    counts[level] -= 1
                    counts[moved] += 1
            elif row < 0:
                negative += 1
            else:
                outside += 1
        return negative, outside
    for i in range(start, end):
        row = rows[i]
        at = np.uint64(np.int64(row))
        number += np.uint64(1)
        if at < table_rows:
            bit = at * wide
            level = _level(packed, bit, mask)
            moved = np.uint64(to[level]) + np.uint64(_random(number) < up[level])
            if moved != level:
                _put(packed, bit, mask, moved)
                counts[level] -= 1
                counts[moved] += 1
        elif row < 0:
            negative += 1
        else:
            outside += 1
    return negative, outside


@numba.njit(cache=True, nogil=True)
def add_weights(rows: Any, weights: Any, packed: Any, counts: Any, bits: int, values: Any, state: Any) -> None:
    """Add to each row its own weight."""
    mask = np.uint64(values.size - 1)
    number = np.uint64(state)
    for i in range(rows.size):
        bit = np.uint64(rows[i]) * np.uint64(bits)
        level = _level(packed, bit, mask)
        below, up_share = _place(values[level] + weights[i], values, np.int64(level))
        number += np.uint64(1)
        moved = np.uint64(below) + np.uint64(_random(number) < _as_threshold(up_share))
        if moved != level:
            _put(packed, bit, mask, moved)
            counts[level] -= 1
            counts[moved] += 1


@numba.njit(cache=True, nogil=True)
def relevel(packed: Any, table_rows: int, bits: int, old_values: Any, values: Any, state: Any) -> None:
    """Replace every level by that of its old value; rounding keeps the mean."""
    to, up = _moves(old_values, 0.0, values)
    mask = np.uint64(values.size - 1)
    number = np.uint64(state)
    for row in range(table_rows):
        bit = np.uint64(row) * np.uint64(bits)
        level = _level(packed, bit, mask)
        number += np.uint64(1)
        if level:
            _put(packed, bit, mask, np.uint64(to[level]) + np.uint64(_random(number) < up[level]))


@numba.njit(cache=True, nogil=True)
def histogram(packed: Any, table_rows: int, bits: int, counts: Any) -> None:
    """Add the number of rows at each level to ``counts``."""
    mask = np.uint64(counts.size - 1)
    for row in range(table_rows):
        counts[_level(packed, np.uint64(row) * np.uint64(bits), mask)] += 1


@numba.njit(cache=True, nogil=True)
def read(packed: Any, rows: Any, bits: int, out: Any) -> None:
    """Write the level of each of ``rows`` to ``out``."""
    mask = np.uint64((1 << bits) - 1)
    for i in range(rows.size):
        out[i] = _level(packed, np.uint64(rows[i]) * np.uint64(bits), mask)


@numba.njit(cache=True, nogil=True)
def collect(packed: Any, table_rows: int, bits: int, starts: Any, ends: Any, rows: Any) -> None:
    """Write the rows of each level, ascending, to ``rows[starts[level]:ends[level]]`` until that is full.

    ``starts`` is advanced.
    """
    mask = np.uint64(starts.size - 1)
    for row in range(table_rows):
        level = _level(packed, np.uint64(row) * np.uint64(bits), mask)
        at = starts[level]
        if at < ends[level]:
            rows[at] = row
            starts[level] = at + 1
