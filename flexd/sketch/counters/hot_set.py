"""A bounded set of rows of a count-min table that may be hot, so that they can be queried by id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.sketch.counters.countmin import BLOCK_IDS, CANDIDATE_BUFFER

Int64Array = npt.NDArray[np.int64]
Query = Callable[[Int64Array], Int64Array]


@numba.njit(cache=True, nogil=True)
def _union(a: Any, b: Any, out: Any) -> int:
    """Merge two ascending arrays without repeats into ``out``. Return the length of the result."""
    i = 0
    j = 0
    n = 0
    while i < a.size and j < b.size:
        x = a[i]
        y = b[j]
        out[n] = min(x, y)
        n += 1
        i += x <= y
        j += y <= x
    for k in range(i, a.size):
        out[n] = a[k]
        n += 1
    for k in range(j, b.size):
        out[n] = b[k]
        n += 1
    return n


def _sorted_unique(rows: Int64Array) -> Int64Array:
    """Return the distinct rows, ascending: four times faster than np.unique, which hashes integers."""
    rows = np.sort(rows)
    kept = np.ones(len(rows), dtype=np.bool_)
    np.not_equal(rows[1:], rows[:-1], out=kept[1:])
    return rows[kept]


class HotSet:
    """Holds up to twice ``capacity`` candidates; when full, queries all of them and keeps the best ``capacity``.

    ``threshold`` is the lowest estimate kept by the last trim. A row is admitted when an access raises its estimate
    past it, so a dropped row returns once it is hotter than the coldest row kept then. Candidates are a by-product of
    counting (``CountMin.add`` fills ``buffer``), so a cold row costs nothing.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise SketchError(f"hot set of {capacity} rows", remedy="keep at least one")
        self.capacity = capacity
        self.threshold = 0
        self.buffer: Int64Array = np.empty(min(CANDIDATE_BUFFER, max(2 * BLOCK_IDS, capacity)), dtype=np.int64)
        self.buffered = 0
        self._rows: Int64Array = np.empty(0, dtype=np.int64)

    @staticmethod
    def bytes_of(capacity: int) -> int:
        """Return the memory of a full set with its buffer."""
        return 8 * (2 * capacity + min(CANDIDATE_BUFFER, max(2 * BLOCK_IDS, capacity)))

    def admit_buffered(self, query: Query) -> None:
        """Admit the buffered candidates, and trim if there are too many (``query``: rows -> estimated units)."""
        if self.buffered:
            new = _sorted_unique(self.buffer[: self.buffered])
            self.buffered = 0
            self._admit(new)
        if len(self._rows) > 2 * self.capacity:
            self._trim(query)

    def rows(self) -> Int64Array:
        """Return the admitted candidates, int64[n] ascending."""
        return self._rows

    def rescale(self, bits: int) -> None:
        """Divide the threshold by ``2^bits``, as ``CountMin.rescale`` divides the cells."""
        self.threshold = (self.threshold + (1 << bits) - 1) >> bits if bits < 63 else 0

    def state(self) -> tuple[dict[str, int], dict[str, Int64Array]]:
        """Return a copy of everything: (threshold, {``hot_rows``, ``hot_buffer``})."""
        arrays = {"hot_rows": self._rows.copy(), "hot_buffer": self.buffer[: self.buffered].copy()}
        return {"hot_threshold": self.threshold}, arrays

    def load(self, meta: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], table_rows: int) -> None:
        """Replace everything by what ``state`` returned.

        Raises:
            SketchError: it does not fit this set.
        """
        rows, buffer = arrays["hot_rows"], arrays["hot_buffer"]
        fits = (
            rows.dtype == buffer.dtype == np.int64
            and len(rows) <= 2 * self.capacity
            and len(buffer) <= len(self.buffer)
            and bool((np.diff(rows) > 0).all())
            and all(len(a) == 0 or (int(a.min()) >= 0 and int(a.max()) < table_rows) for a in (rows, buffer))
        )
        if not fits:
            raise SketchError(f"saved hot set does not fit {self.capacity} rows", remedy="start from empty counters")
        self.threshold = int(meta["hot_threshold"])
        self._rows = rows.copy()
        self.buffered = len(buffer)
        self.buffer[: self.buffered] = buffer

    def _admit(self, new: Int64Array) -> None:
        out = np.empty(len(self._rows) + len(new), dtype=np.int64)
        self._rows = out[: _union(self._rows, new, out)]

    def _trim(self, query: Query) -> None:
        estimates = query(self._rows)
        at = len(estimates) - self.capacity
        best = np.argpartition(estimates, at)[at:]
        self.threshold = int(estimates[best].min())
        self._rows = np.sort(self._rows[best])


def warm_up() -> None:
    """Compile the kernel (or load it from numba's cache)."""
    one = np.zeros(1, dtype=np.int64)
    _union(one, one, np.empty(2, dtype=np.int64))
