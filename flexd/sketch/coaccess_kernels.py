"""Compiled parts of the co-access sample: words of 32 bits, part after part.

A part is the rows of one table in one sample: ``HEADER`` words and one word a row. Header: key (2 words), event time
(float64, 2 words), user (int64, 2 words), table, number of rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from flexd.core.sample_hash import FIRST, GAMMA, SECOND

HEADER = 8
NO_USER = -(2**63)
_BINS = 4096


@numba.njit(cache=True, nogil=True, inline="always")
def _mix(value: Any) -> Any:
    z = value + np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    return z ^ (z >> np.uint64(31))


@numba.njit(cache=True, nogil=True, inline="always")
def _draw(key: Any) -> Any:
    """Return the sample's draw from Exp(1). The key was mixed once for its identity; this mix is independent of it."""
    return -np.log((np.float64(_mix(key) >> np.uint64(11)) + 0.5) * 2.0**-53)


@numba.njit(cache=True, nogil=True)
def offer(
    ids: Any, base: Any, users: Any, lengths: Any, rows: Any, table: int, table_rows: int, time: float,
    largest_draw: float, longest: int, start: int, first_row: int, words: Any, used: int, counts: Any,
) -> tuple[int, int, int]:  # fmt: skip
    """Append the samples whose draw is at most ``largest_draw``, until the next one does not fit into ``words``.

    Args:
        ids: int64 [s] sample ids, or empty: samples are the positions from ``base`` on.
        users: int64 [s], or empty.
        start, first_row: sample to begin with, and its first place in ``rows``.
        counts: int64 [2], increased by samples kept and by samples with more than ``longest`` rows, which are left out.

    Returns:
        (next sample, its first place in ``rows``, words used).
    """
    at = start
    place = first_row
    floats = np.empty(1, dtype=np.float64)
    halves = floats.view(np.uint32)
    floats[0] = time
    while at < lengths.size:
        length = lengths[at]
        key = _mix(np.uint64(ids[at])) if ids.size else _mix(base + np.uint64(at))
        if length > 0 and _draw(key) <= largest_draw:
            if length > longest:
                counts[1] += 1
            else:
                if used + HEADER + length > words.size:
                    return at, place, used
                end = used + HEADER
                for j in range(place, place + length):
                    row = np.int64(rows[j])
                    if 0 <= row < table_rows:
                        words[end] = np.uint32(row)
                        end += 1
                if end > used + HEADER:
                    user = np.uint64(users[at]) if users.size else np.uint64(1) << np.uint64(63)
                    words[used] = np.uint32(key)
                    words[used + 1] = np.uint32(key >> np.uint64(32))
                    words[used + 2] = halves[0]
                    words[used + 3] = halves[1]
                    words[used + 4] = np.uint32(user)
                    words[used + 5] = np.uint32(user >> np.uint64(32))
                    words[used + 6] = np.uint32(table)
                    words[used + 7] = np.uint32(end - used - HEADER)
                    used = end
                    counts[0] += 1
        place += length
        at += 1
    return at, place, used


@numba.njit(cache=True, nogil=True)
def _priority(words: Any, at: int, weight_per_second: float, double: Any) -> Any:
    """Return the logarithm of the draw over the forward weight."""
    key = np.uint64(words[at]) | np.uint64(words[at + 1]) << np.uint64(32)
    halves = double.view(np.uint32)
    halves[0] = words[at + 2]
    halves[1] = words[at + 3]
    return np.log(_draw(key)) - double[0] * weight_per_second


@numba.njit(cache=True, nogil=True)
def trim(words: Any, used: int, weight_per_second: float, limit: Any, keep: int) -> tuple[int, float]:
    """Remove parts above a limit, so that at most ``keep`` words remain. Return (words used, limit).

    The limit is the edge of one of 4,096 equal bins of priorities; if the first bin alone has too many words it is
    divided again. What remains is every part with a priority up to the limit, in its order.

    Args:
        weight_per_second: natural logarithm of the forward weight, a second of event time.
        limit: parts above it are removed in any case.
    """
    double = np.empty(1, dtype=np.float64)
    low, high = np.inf, -np.inf
    total: Any = 0
    at: Any = 0
    while at < used:
        size = HEADER + np.int64(words[at + 7])
        p = _priority(words, at, weight_per_second, double)
        if p <= limit:
            low = min(low, p)
            high = max(high, p)
            total += size
        at += size
    # Priorities below ``low`` are known to fit; ``kept`` are their words.
    kept: Any = 0
    if total > keep:
        for _ in range(8):
            width = (high - low) / _BINS
            sizes = np.zeros(_BINS, dtype=np.int64)
            at = 0
            while at < used:
                size = HEADER + np.int64(words[at + 7])
                p = _priority(words, at, weight_per_second, double)
                if low <= p <= high and p <= limit:
                    place = np.int64((p - low) / width) if width > 0 else 0
                    sizes[min(place, _BINS - 1)] += size
                at += size
            chosen = 0
            while chosen < _BINS and kept + sizes[chosen] <= keep:
                kept += sizes[chosen]
                chosen += 1
            limit = np.nextafter(low + chosen * width, -np.inf)
            if chosen > 0 or width <= 0:
                break
            high = low + width
        # Rounding of a bin's edge may keep a part that its bin did not count: compaction tells.
    end: Any = 0
    at = 0
    while at < used:
        size = HEADER + np.int64(words[at + 7])
        if _priority(words, at, weight_per_second, double) <= limit:
            if end != at:
                for j in range(size):
                    words[end + j] = words[at + j]
            end += size
        at += size
    return end, limit


@numba.njit(cache=True, nogil=True)
def locate_parts(words: Any, used: int, count: int) -> tuple[Any, Any]:
    """Return int64 [count] places of the parts and int64 [count] their numbers of rows."""
    places = np.empty(count, dtype=np.int64)
    sizes = np.empty(count, dtype=np.int64)
    at: Any = 0
    for i in range(count):
        places[i] = at
        sizes[i] = np.int64(words[at + 7])
        at += HEADER + sizes[i]
    return places, sizes


@numba.njit(cache=True, nogil=True)
def count_parts(words: Any, used: int) -> int:
    """Return the number of parts; -1 if the words are not a row of whole parts."""
    at: Any = 0
    count = 0
    while at < used:
        if at + HEADER > used or words[at + 7] == 0:
            return -1
        at += HEADER + np.int64(words[at + 7])
        count += 1
    return count if at == used else -1


@numba.njit(cache=True, nogil=True)
def gather_rows(words: Any, places: Any, sizes: Any, rows: Any) -> None:
    """Copy the rows of the parts, one after another, into int64 ``rows``."""
    end = 0
    for i in range(places.size):
        for j in range(sizes[i]):
            rows[end] = np.int64(words[places[i] + HEADER + j])
            end += 1


def warm_up() -> None:
    """Compile the kernels (or load them from numba's cache)."""
    words = np.zeros(64, dtype=np.uint32)
    none, counts = np.empty(0, dtype=np.int64), np.zeros(2, dtype=np.int64)
    lengths = np.ones(1, dtype=np.int32)
    lengths.flags.writeable = False
    used = 0
    for rows in (np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)):
        rows.flags.writeable = False
        for given in (none, np.zeros(1, dtype=np.int64)):
            _, _, used = offer(
                _readonly(given), np.uint64(0), _readonly(given), lengths, rows, 0, 1, 0.0, np.inf, 8, 0, 0, words, 0,
                counts,
            )  # fmt: skip
    trim(words, used, 0.0, np.inf, 64)
    places, sizes = locate_parts(words, used, count_parts(words, used))
    gather_rows(words, places, sizes, np.empty(int(sizes.sum()), dtype=np.int64))


def _readonly(values: Any) -> Any:
    view = values.view()
    view.flags.writeable = False
    return view
