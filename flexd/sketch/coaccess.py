"""The co-access sample: which rows occur together, from whole training samples within a stated memory.

A sample is kept if ``Exp(1) / weight`` is small, with the draw taken from a hash of the sample (priority sampling with
forward decay: Efraimidis and Spirakis, IPL 2006; Cormode et al., ICDE 2009, section 4; coordinated by the hash as in
Cohen, *Sampling big data for distributed analytics*, 2014). So all rows of a sample are kept or none, whichever
table or message they come from.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core import sample_hash
from flexd.core.errors import SketchError
from flexd.sketch import coaccess_kernels as kernels
from flexd.sketch.coaccess_kernels import HEADER, NO_USER

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
Arrays = dict[str, npt.NDArray[Any]]

MIN_BYTES = 65_536
MAX_ROWS = 2**32
"""Rows of a table from here on are left out: a row takes four bytes."""
LONGEST_SHARE = 16
"""A sample's part of more than a sixteenth of the memory is left out."""
_KEPT_SHARE = 0.75
"""Of the memory after a trim. What comes until the next one has the rest."""
_ARRAY = "coaccess/words"
_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class CoAccess:
    """Sampled training samples: parts, each with the rows of one table in one sample, in order of event time.

    Attributes:
        tables: names, in the order of the key space.
        table_rows: int64 [tables].
        sample: int64 [parts], number of the sample, from 0 in order of its first event time.
        table: int64 [parts], index into ``tables``.
        offsets: int64 [parts + 1], where the rows of each part begin in ``rows``.
        rows: int64 [n], row ids, as often as the sample looks them up.
        event_time_seconds: float64 [samples].
        user: int64 [samples], ``NO_USER`` where none was given.
        offered: samples of one table each that were seen, undecayed.
        too_long: of them those left out because of their length.
    """

    tables: tuple[str, ...]
    table_rows: Int64Array
    sample: Int64Array
    table: Int64Array
    offsets: Int64Array
    rows: Int64Array
    event_time_seconds: Float64Array
    user: Int64Array
    offered: int
    too_long: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.event_time_seconds)


class CoAccessSample:
    """Keeps whole samples within a memory. Not thread-safe: the owner holds a lock.

    After every call it holds exactly the parts offered so far whose priority is at most a limit that only falls.

    Args:
        tables: rows of each table, in the order of the key space.
        memory_bytes: of the sample. While it is trimmed nothing is copied; reading and saving copy what is in use.
        half_life_seconds: of a sample's weight; None: all samples count alike.

    Raises:
        SketchError: too little memory.
    """

    def __init__(self, table_rows: Sequence[int], memory_bytes: int, half_life_seconds: float | None) -> None:
        if memory_bytes < MIN_BYTES:
            raise SketchError(
                f"co-access sample of {memory_bytes} bytes",
                remedy=f"give sketch.coaccess_memory_bytes at least {MIN_BYTES}, or 0 for none",
            )
        self._table_rows = tuple(min(rows, MAX_ROWS) for rows in table_rows)
        self._words: UInt32Array = np.zeros(memory_bytes // 4, dtype=np.uint32)
        self._used = 0
        self._limit = math.inf
        self._longest = len(self._words) // LONGEST_SHARE - HEADER
        self._weight_per_second = 0.0 if half_life_seconds is None else math.log(2.0) / half_life_seconds
        self._counts = np.zeros(2, dtype=np.int64)
        self.offered = 0

    @property
    def nbytes(self) -> int:
        """Memory of the sample, used or not."""
        return self._words.nbytes

    @property
    def too_long(self) -> int:
        """Parts left out because of their length."""
        return int(self._counts[1])

    @property
    def limit(self) -> float:
        """Largest priority kept: ``log(Exp(1)) - log(forward weight)``; infinite until memory is full once."""
        return self._limit

    def add(
        self,
        table: int,
        rows: npt.NDArray[np.int32] | Int64Array,
        lengths: npt.NDArray[np.int32],
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
            base = sample_hash.step_base(source_rank, step)
        else:
            base = sample_hash.entry_base(table, source_rank, bits)
        ids = _NONE if sample_ids is None else sample_ids
        users = _NONE if user_ids is None else user_ids
        at = place = 0
        self.offered += len(lengths)
        while at < len(lengths):
            power = self._limit + event_time_seconds * self._weight_per_second
            largest = math.exp(power) if power < 700 else math.inf
            at, place, self._used = kernels.offer(
                _readonly(ids), np.uint64(base), _readonly(users), _readonly(lengths), _readonly(rows), table,
                self._table_rows[table], event_time_seconds, largest, self._longest, at, place, self._words,
                self._used, self._counts,
            )  # fmt: skip
            if at < len(lengths):
                self._trim(self._words)

    def read(self, tables: Sequence[str]) -> CoAccess:
        """Return the samples, in order of event time. A second part of the same sample and table is left out.

        Args:
            tables: their names.
        """
        count = kernels.count_parts(self._words, self._used)
        places, sizes = kernels.locate_parts(self._words, self._used, count)
        keys = self._word_pairs(places, np.uint64)
        times = self._word_pairs(places + 2, np.float64)
        users = self._word_pairs(places + 4, np.int64)
        table = self._words[places + 6].astype(np.int64)
        # The first part of a sample and table, and the earliest time of a sample, whatever order messages came in.
        order = np.lexsort((np.arange(count), table, keys))
        first = np.ones(count, dtype=np.bool_)
        first[1:] = (keys[order[1:]] != keys[order[:-1]]) | (table[order[1:]] != table[order[:-1]])
        order = order[first]
        distinct, sample = np.unique(keys[order], return_inverse=True)
        sample = sample.reshape(-1)
        starts = np.flatnonzero(np.diff(sample, prepend=-1))
        earliest = np.minimum.reduceat(times[order], starts) if count else np.empty(0)
        owner = np.maximum.reduceat(users[order], starts) if count else np.empty(0, dtype=np.int64)
        by_time = np.lexsort((distinct, earliest))
        number = np.empty(len(distinct), dtype=np.int64)
        number[by_time] = np.arange(len(distinct))
        sample = number[sample]
        sorted_parts = np.argsort(sample, kind="stable")
        order, sample = order[sorted_parts], sample[sorted_parts]
        offsets = np.concatenate([[0], np.cumsum(sizes[order])]).astype(np.int64)
        rows = np.empty(int(offsets[-1]), dtype=np.int64)
        kernels.gather_rows(self._words, places[order], sizes[order], rows)
        return CoAccess(
            tuple(tables), np.array(self._table_rows, dtype=np.int64), sample, table[order], offsets, rows,
            earliest[by_time], owner[by_time], self.offered, self.too_long,
        )  # fmt: skip

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return a copy of everything: (JSON-able values, arrays)."""
        meta = {"limit": self._limit.hex(), "offered": self.offered, "counts": self._counts.tolist()}
        return meta, {_ARRAY: self._words[: self._used].copy()}

    def load(self, meta: dict[str, Any], arrays: Arrays, tables: Sequence[int]) -> None:
        """Replace everything by what ``state`` returned, of this or another memory or list of tables.

        Args:
            tables: index here of each of the saved tables, -1 for those that are no more.

        Raises:
            SketchError: it is damaged.
            KeyError, TypeError, ValueError: fields are missing or malformed.
        """
        limit, counts = float.fromhex(meta["limit"]), np.array(meta["counts"], dtype=np.int64)
        words = arrays[_ARRAY]
        if words.dtype != np.uint32 or words.ndim != 1 or counts.shape != (2,) or math.isnan(limit):
            raise SketchError("saved co-access sample is malformed", remedy="use an earlier snapshot")
        count = kernels.count_parts(words, len(words))
        if count < 0:
            raise SketchError("saved co-access sample is damaged", remedy="use an earlier snapshot")
        places, sizes = kernels.locate_parts(words, len(words), count)
        saved = words[places + 6].astype(np.int64)
        index = np.array(tables, dtype=np.int64)
        if count and int(saved.max()) >= len(index):
            raise SketchError("saved co-access sample is of more tables", remedy="use an earlier snapshot")
        now = index[saved] if count else saved
        fits = (now >= 0) & (sizes <= self._longest)
        fits &= self._rows_fit(words, places, sizes, now)
        words = words.copy()
        words[places + 6] = np.maximum(now, 0).astype(np.uint32)
        if not fits.all():
            words = words[np.repeat(fits, sizes + HEADER)]
        self._limit, self._counts, self.offered = limit, counts, int(meta["offered"])
        self._load_words(words)

    def _rows_fit(
        self, words: UInt32Array, places: Int64Array, sizes: Int64Array, tables: Int64Array
    ) -> npt.NDArray[np.bool_]:
        if not len(places):
            return np.ones(0, dtype=np.bool_)
        rows = np.empty(int(sizes.sum()), dtype=np.int64)
        kernels.gather_rows(words, places, sizes, rows)
        most = np.maximum.reduceat(rows, np.cumsum(sizes) - sizes)
        fits: npt.NDArray[np.bool_] = most < np.array(self._table_rows, dtype=np.int64)[np.maximum(tables, 0)]
        return fits

    def _load_words(self, words: UInt32Array) -> None:
        used, self._limit = kernels.trim(
            words, len(words), self._weight_per_second, self._limit,
            len(self._words) if len(words) <= len(self._words) else self._kept_words(),
        )  # fmt: skip
        self._words[:used] = words[:used]
        self._used = used

    def _trim(self, words: UInt32Array) -> None:
        self._used, self._limit = kernels.trim(
            words, self._used, self._weight_per_second, self._limit, min(self._kept_words(), self._used - 1)
        )

    def _kept_words(self) -> int:
        return int(_KEPT_SHARE * len(self._words))

    def _word_pairs(self, places: Int64Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        pairs = np.stack([self._words[places], self._words[places + 1]], axis=1)
        return np.ascontiguousarray(pairs).view(dtype).reshape(-1)


def _readonly(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = values.view()
    view.flags.writeable = False
    return view


__all__ = ["MIN_BYTES", "NO_USER", "CoAccess", "CoAccessSample"]
