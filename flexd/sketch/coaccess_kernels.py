"""Compiled parts of the co-access sample: words of 32 bits, part after part.

A part is the rows of one table in one sample: ``HEADER`` words and one word per row. Header: key (2 words), event time
(float64, 2 words), user (int64, 2 words), table, number of rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from flexd.core.sample_hash import FIRST, GAMMA, SECOND

HEADER = 8
NO_USER = -(2**63)


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
    largest_draw: float, longest: int, start: int, first_row: int, words: Any, used: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Append the samples whose draw is at most ``largest_draw``, until the next one does not fit into ``words``.

    Samples with more than ``longest`` rows are left out.

    Args:
        ids: int64 [s] sample ids, or empty: samples are the positions from ``base`` on.
        users: int64 [s], or empty.
        start, first_row: sample to begin with, and its first place in ``rows``.

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
        if 0 < length <= longest and _draw(key) <= largest_draw:
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
        place += length
        at += 1
    return at, place, used


@numba.njit(cache=True, nogil=True)
def priorities(words: Any, places: Any, weight_per_second: float) -> Any:
    """Return float64 [parts]: the logarithm of each part's draw over its forward weight."""
    out = np.empty(places.size, dtype=np.float64)
    double = np.empty(1, dtype=np.float64)
    halves = double.view(np.uint32)
    for i in range(places.size):
        at = places[i]
        halves[0] = words[at + 2]
        halves[1] = words[at + 3]
        key = np.uint64(words[at]) | np.uint64(words[at + 1]) << np.uint64(32)
        out[i] = np.log(_draw(key)) - double[0] * weight_per_second
    return out


@numba.njit(cache=True, nogil=True)
def locate_parts(words: Any) -> tuple[Any, int]:
    """Return (int64 [parts] places of the parts, place behind the last: if that is not the end, words are damaged)."""
    places = np.empty(words.size // HEADER, dtype=np.int64)
    at: Any = 0
    count = 0
    while at + HEADER <= words.size and words[at + 7] > 0:
        places[count] = at
        at += HEADER + np.int64(words[at + 7])
        count += 1
    return places[:count], at


def warm_up() -> None:
    """Compile the kernels (or load them from numba's cache)."""
    words = np.zeros(64, dtype=np.uint32)
    lengths = readonly(np.ones(1, dtype=np.int32))
    used = 0
    for rows in (np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)):
        for given in (np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)):
            _, _, used = offer(
                readonly(given), np.uint64(0), readonly(given), lengths, readonly(rows), 0, 1, 0.0, np.inf, 8, 0, 0,
                words, used,
            )  # fmt: skip
    priorities(words[:used], locate_parts(words[:used])[0], 0.0)


def readonly(values: Any) -> Any:
    """Return a read-only view: one compiled version serves arrays of both kinds."""
    view = values.view()
    view.flags.writeable = False
    return view
