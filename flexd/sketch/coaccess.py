"""The co-access sample: which rows occur together, from whole training samples within a stated memory.

A sample is kept if ``Exp(1) / weight`` is small, with the draw taken from a hash of the sample (priority sampling with
forward decay: Efraimidis and Spirakis, IPL 2006; Cormode et al., ICDE 2009, section 4; coordinated by the hash as in
Cohen, *Sampling big data for distributed analytics*, 2014). So all rows of a sample are kept or none, whichever
table or message they come from.

The memory is words of 32 bits, part after part. A part is the rows of one table in one sample: ``HEADER`` words and one
word per row. Header: key (2 words), event time (float64, 2 words), user (int64, 2 words), table, number of rows.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from flexd.core import tap_counts
from flexd.core.arrays import Arrays, Float64Array, Int32Array, Int64Array, RowArray, UInt32Array, places_of_runs
from flexd.sketch.kernel_parts import mix
from flexd.sketch.table_sketch import readonly

MIN_BYTES = 65_536
# Rows of a table from here on are left out: a row takes four bytes.
MAX_ROWS = 2**32
# Of the memory after a trim. What comes until the next one has the rest.
_KEPT_SHARE = 0.75
_ARRAY = "coaccess/words"
HEADER = 8
NO_USER = -(2**63)


@numba.njit(cache=True, nogil=True, inline="always")
def _draw(key: Any) -> Any:
    # Return the sample's draw from Exp(1). The key was mixed once for its identity; this mix is independent of it.
    return -np.log((np.float64(mix(key) >> np.uint64(11)) + 0.5) * 2.0**-53)


@numba.njit(cache=True, nogil=True)
def _offer(
    look_up: Any, largest_draw: float, longest: int, start: int, first_row: int, words: Any, used: int
) -> tuple[int, int, int]:
    """Append the samples whose draw is at most ``largest_draw``, until the next one does not fit into ``words``.

    Samples with more than ``longest`` rows are left out.

    Args:
        look_up: int64 [s] sample ids, or empty: samples are the positions from ``base`` on; ``base``; int64 [s] user
            ids, or empty; int32 [s] lengths of the samples; their rows; the table, its rows, and the event time.
        start, first_row: sample to begin with, and its first place in the rows.

    Returns:
        (next sample, its first place in the rows, words used).
    """
    ids, base, users, lengths, rows, table, table_rows, time = look_up
    at = start
    place = first_row
    floats = np.empty(1, dtype=np.float64)
    halves = floats.view(np.uint32)
    floats[0] = time
    while at < lengths.size:
        length = lengths[at]
        key = mix(np.uint64(ids[at])) if ids.size else mix(base + np.uint64(at))
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
def _priorities(words: Any, places: Any, weight_per_second: float) -> Any:
    # Return float64 [parts]: the logarithm of each part's draw over its forward weight.
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
def _locate_parts(words: Any) -> Any:
    places = np.empty(words.size // HEADER, dtype=np.int64)
    at: Any = 0
    count = 0
    while at < words.size:
        places[count] = at
        at += HEADER + np.int64(words[at + 7])
        count += 1
    return places[:count]


@numba.njit(cache=True, nogil=True)
def _compact(words: Any, places: Any, kept: Any) -> Any:
    used: Any = 0
    for i in range(places.size):
        if kept[i]:
            at = places[i]
            for j in range(HEADER + np.int64(words[at + 7])):
                words[used] = words[at + j]
                used += 1
    return used


@dataclass(frozen=True)
class CoAccess:
    """Sampled training samples: parts, each with the rows of one table in one sample, in order of event time.

    Attributes:
        tables: names, in the order of the key space.
        sample: int64 [parts], number of the sample, from 0 in order of its first event time.
        table: int64 [parts], index into ``tables``.
        offsets: int64 [parts + 1], where the rows of each part begin in ``rows``.
        rows: int64 [n], row ids, as often as the sample looks them up.
        event_time_seconds: float64 [samples].
        user: int64 [samples], ``NO_USER`` where none was given.
    """

    tables: tuple[str, ...]
    sample: Int64Array
    table: Int64Array
    offsets: Int64Array
    rows: Int64Array
    event_time_seconds: Float64Array
    user: Int64Array

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.event_time_seconds)


class CoAccessSample:
    """Keeps whole samples within a memory. Not thread-safe: the owner holds a lock.

    After every call it holds exactly the parts offered so far whose priority is at most a limit that only falls.

    Args:
        tables: rows of each table, in the order of the key space.
        memory_bytes: of the sample, ``MIN_BYTES`` or more. Reading and saving copy what is in use.
        half_life_seconds: of a sample's weight; None: all samples count alike.
    """

    def __init__(self, table_rows: Sequence[int], memory_bytes: int, half_life_seconds: float | None) -> None:
        self._table_rows = tuple(min(rows, MAX_ROWS) for rows in table_rows)
        self._words: UInt32Array = np.zeros(memory_bytes // 4, dtype=np.uint32)
        self._used = 0
        # Largest priority kept: ``log(Exp(1)) - log(forward weight)``; infinite until memory is full once.
        self.limit = math.inf
        # A sample's part of more than a sixteenth of the memory is left out.
        self._longest = len(self._words) // 16 - HEADER
        self._weight_per_second = 0.0 if half_life_seconds is None else math.log(2.0) / half_life_seconds

    def add(
        self,
        table: int,
        rows: RowArray,
        lengths: Int32Array,
        source_rank: int,
        event_time_seconds: float,
        step: int | None = None,
        sample_ids: Int64Array | None = None,
        user_ids: Int64Array | None = None,
    ) -> None:
        """Offer the samples of one look-up.

        Samples are the same if they have the same id. Without ids those at the same place of one rank's look-ups with
        the same step number are; without a step number every look-up has samples of its own.

        Args:
            table: its index.
            rows: [n], contiguous; ids outside the table are left out.
            lengths: int32 [s], of the samples that ``rows`` consists of; sums to n.
            sample_ids, user_ids: int64 [s] or None.
        """
        bits = struct.unpack("<q", struct.pack("<d", event_time_seconds))[0]
        if step is not None:
            base = tap_counts.step_base(source_rank, step)
        else:
            base = tap_counts.entry_base(table, source_rank, bits)
        none = np.empty(0, dtype=np.int64)
        look_up = (
            readonly(none if sample_ids is None else sample_ids), np.uint64(base),
            readonly(none if user_ids is None else user_ids), readonly(lengths), readonly(rows), table,
            self._table_rows[table], event_time_seconds,
        )  # fmt: skip
        at = place = 0
        while at < len(lengths):
            power = self.limit + event_time_seconds * self._weight_per_second
            largest = math.exp(power) if power < 700 else math.inf
            at, place, self._used = _offer(look_up, largest, self._longest, at, place, self._words, self._used)
            if at < len(lengths):
                self._trim()

    def read(self, tables: Sequence[str]) -> CoAccess:
        """Return the samples, in order of event time. A second part of the same sample and table is left out.

        Args:
            tables: their names.
        """
        places, sizes = _parts(self._words[: self._used])
        keys = self._word_pairs(places, np.uint64)
        times = self._word_pairs(places + 2, np.float64)
        users = self._word_pairs(places + 4, np.int64)
        table = self._words[places + 6].astype(np.int64)
        # The first part of a sample and table, and the earliest time of a sample, whatever order messages came in.
        order = np.lexsort((np.arange(len(places)), table, keys))
        first = np.ones(len(places), dtype=np.bool_)
        first[1:] = (keys[order[1:]] != keys[order[:-1]]) | (table[order[1:]] != table[order[:-1]])
        order = order[first]
        distinct, sample = np.unique(keys[order], return_inverse=True)
        starts = np.flatnonzero(np.diff(sample, prepend=-1))
        earliest = np.minimum.reduceat(times[order], starts) if len(starts) else np.empty(0)
        owner = np.maximum.reduceat(users[order], starts) if len(starts) else np.empty(0, dtype=np.int64)
        by_time = np.lexsort((distinct, earliest))
        number = np.empty(len(distinct), dtype=np.int64)
        number[by_time] = np.arange(len(distinct))
        sample = number[sample]
        sorted_parts = np.argsort(sample, kind="stable")
        order, sample = order[sorted_parts], sample[sorted_parts]
        offsets = np.concatenate([[0], np.cumsum(sizes[order])]).astype(np.int64)
        rows = self._words[places_of_runs(places[order] + HEADER, sizes[order])].astype(np.int64)
        return CoAccess(tuple(tables), sample, table[order], offsets, rows, earliest[by_time], owner[by_time])

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return a copy of everything: (JSON-able values, arrays)."""
        return {"limit": self.limit.hex()}, {_ARRAY: self._words[: self._used].copy()}

    def load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        """Replace everything by what ``state`` returned, of the same tables and half-life; all if it fits the memory.

        Raises:
            KeyError, TypeError, ValueError: fields are missing or malformed.
        """
        limit, words = float.fromhex(meta["limit"]), arrays[_ARRAY]
        if len(words) <= len(self._words):
            self._words[: len(words)] = words
            self.limit, self._used = limit, len(words)

    def _trim(self) -> None:
        """Remove the parts of the highest priorities, so that ``_KEPT_SHARE`` of the memory is in use at most.

        What remains is every part with a priority up to the limit, in its order.
        """
        words = self._words[: self._used]
        places, sizes = _parts(words)
        priority = _priorities(words, places, self._weight_per_second)
        order = np.argsort(priority)
        fitting = np.searchsorted(np.cumsum(sizes[order] + HEADER), _KEPT_SHARE * len(self._words), side="right")
        # Parts of equal priority are of one sample: all stay or none.
        self.limit = float(np.nextafter(priority[order[fitting]], -np.inf))
        self._used = _compact(words, places, priority <= self.limit)

    def _word_pairs(self, places: Int64Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        pairs = np.stack([self._words[places], self._words[places + 1]], axis=1)
        return np.ascontiguousarray(pairs).view(dtype).reshape(-1)


def _parts(words: UInt32Array) -> tuple[Int64Array, Int64Array]:
    places = _locate_parts(words)
    return places, words[places + 7].astype(np.int64)
