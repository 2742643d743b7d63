"""A bounded sample of accesses with their source ranks, weighted by decayed weight."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_SPARSE = 0.1
"""Below this chance of an access to enter, the distance to the next one is drawn instead of every access."""
_MAX_RANK = 2**31 - 1
_LEAST_DRAW = 5e-324


@numba.njit(cache=True, nogil=True)
def _exponential(state: Any) -> Any:
    """Draw from Exp(1) with SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*,
    OOPSLA 2014). Passing numpy's generators to compiled code takes longer than a whole message."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return -np.log((np.float64(z >> np.uint64(11)) + 0.5) * 2.0**-53)


@numba.njit(cache=True, nogil=True)
def _select(
    ids: Any,
    start: int,
    chance: float,
    gap: float,
    random: Any,
    table_rows: int,
    rank: Any,
    log_weight: float,
    rows: Any,
    ranks: Any,
    keys: Any,
    count: int,
) -> tuple[int, float, int]:
    """Append the accesses that enter, until there are no more or the buffer is full.

    Each access covers a length of ``chance`` on a line with points at unit rate. It enters if a point lies on its part,
    and the position of the first point there is its draw. ``gap`` is the distance from ``start`` to the next point.
    """
    at = start
    while at < ids.size and count < rows.size:
        if chance > _SPARSE:
            draw = _exponential(random)
            entered = at
            at += 1
            if draw >= chance:
                continue
        else:
            parts = gap / chance
            if parts >= ids.size - at:
                return ids.size, gap - (ids.size - at) * chance, count
            entered = at + int(parts)
            draw = min(max(gap - int(parts) * chance, 0.0), chance)
            at = entered + 1
            gap = _exponential(random)
        row = np.int64(ids[entered])
        if 0 <= row < table_rows:
            rows[count] = row
            ranks[count] = rank
            keys[count] = np.log(max(draw, _LEAST_DRAW)) - log_weight
            count += 1
    return at, gap, count


class AccessSample:
    """Keeps the accesses with the lowest ``Exp(1) / weight`` (Efraimidis and Spirakis, *Weighted random sampling with
    a reservoir*, IPL 2006; with forward decay as in Cormode et al. 2009, section 4).

    A share p estimated from a sample of n has a standard error of ``sqrt(p (1 - p) / n)``, at most 0.2 % for 65,536.
    Keys are logarithms, so they need no rescaling. Only accesses that enter cost time: the weight that passes until the
    next one enters is exponential and drawn in advance (the "exponential jumps" of the same paper), so most messages
    cost one comparison.

    Args:
        capacity: accesses kept (up to twice as many between two trims).
        seed: of the draws; equal streams give equal samples.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        if capacity < 1:
            raise SketchError(f"sample of {capacity} accesses", remedy="keep at least one")
        self.capacity = capacity
        self._random = np.array([seed % 2**64], dtype=np.uint64)
        self._rows: Int64Array = np.empty(2 * capacity, dtype=np.int64)
        self._ranks: Int32Array = np.empty(2 * capacity, dtype=np.int32)
        self._keys: Float64Array = np.empty(2 * capacity, dtype=np.float64)
        self._count = 0
        self._limit = math.inf
        """Accesses with a larger key are not in the sample."""
        self._gap = float(_exponential(self._random))
        """Distance to the next access that enters, in units of an access' chance to enter."""

    def __len__(self) -> int:
        return self._count

    @staticmethod
    def bytes_of(capacity: int) -> int:
        """Return the memory of a sample: row, rank and key of twice its capacity."""
        return 2 * (8 + 4 + 8) * capacity

    def add(
        self, rows: npt.NDArray[np.int32] | Int64Array, source_rank: int, log_weight: float, table_rows: int
    ) -> None:
        """Offer accesses of one event time and one rank.

        Args:
            rows: int32[n] or int64[n]; ids outside ``0..table_rows`` are left out.
            source_rank: of all of them; kept as -1 if it is no rank.
            log_weight: natural logarithm of their forward weight.
        """
        chance = self._chance(log_weight)
        if chance <= _SPARSE and len(rows) * chance <= self._gap:
            self._gap -= len(rows) * chance
            return
        rank = np.int32(source_rank if 0 <= source_rank <= _MAX_RANK else -1)
        readonly = rows.view()
        readonly.flags.writeable = False
        start = 0
        while start < len(rows):
            start, self._gap, self._count = _select(
                readonly, start, self._chance(log_weight), self._gap, self._random, table_rows, rank, log_weight,
                self._rows, self._ranks, self._keys, self._count,
            )  # fmt: skip
            if self._count == len(self._rows):
                self._trim()

    def _chance(self, log_weight: float) -> float:
        """Return the chance of an access to enter, to first order: its length on the line that ``_gap`` measures."""
        power = self._limit + log_weight
        return math.exp(power) if power < 700 else math.inf

    def _append(self, rows: Int64Array, ranks: Int32Array, keys: Float64Array) -> None:
        if self._count + len(rows) > 2 * self.capacity:
            self._trim()
            kept = keys <= self._limit
            rows, ranks, keys = rows[kept], ranks[kept], keys[kept]
        end = self._count + len(rows)
        self._rows[self._count : end] = rows
        self._ranks[self._count : end] = ranks
        self._keys[self._count : end] = keys
        self._count = end

    def rows(self) -> Int64Array:
        """Return the row of each sampled access, int64[n]; rows repeat as often as they were sampled."""
        return self._rows[: self._count].copy()

    def source_ranks(self) -> Int32Array:
        """Return the source rank of each of ``rows``, int32[n]; -1 if it was no rank."""
        return self._ranks[: self._count].copy()

    def state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return a copy of everything.

        Returns:
            (random state and limit, {``sample_rows`` int64[n], ``sample_ranks`` int32[n], ``sample_keys`` float64[n]}).
        """
        meta = {
            "sample_limit": self._limit.hex(),
            "sample_gap": self._gap.hex(),
            "sample_random": f"{int(self._random[0]):x}",
        }
        arrays: dict[str, npt.NDArray[Any]] = {
            "sample_rows": self.rows(),
            "sample_ranks": self.source_ranks(),
            "sample_keys": self._keys[: self._count].copy(),
        }
        return meta, arrays

    def load(self, meta: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], table_rows: int) -> None:
        """Replace everything by what ``state`` returned, of a sample of any capacity.

        Raises:
            SketchError: it is of other rows, or malformed.
        """
        rows, ranks, keys = arrays["sample_rows"], arrays["sample_ranks"], arrays["sample_keys"]
        gap = float.fromhex(meta["sample_gap"])
        fits = (
            rows.dtype == np.int64
            and ranks.dtype == np.int32
            and keys.dtype == np.float64
            and rows.shape == ranks.shape == keys.shape == (len(rows),)
            and (len(rows) == 0 or (int(rows.min()) >= 0 and int(rows.max()) < table_rows and int(ranks.min()) >= -1))
            and 0 <= gap < math.inf
        )
        if not fits:
            raise SketchError(f"saved sample does not fit {table_rows} rows", remedy="start from empty counters")
        limit = float.fromhex(meta["sample_limit"])
        if len(rows) > 2 * self.capacity:
            best = np.sort(np.argpartition(keys, self.capacity - 1)[: self.capacity])
            rows, ranks, keys = rows[best], ranks[best], keys[best]
            limit = float(keys.max())
        self._random = np.array([int(meta["sample_random"], 16) % 2**64], dtype=np.uint64)
        self._limit, self._gap, self._count = limit, gap, 0
        self._append(rows, ranks, keys)

    def _trim(self) -> None:
        """Keep the ``capacity`` accesses with the lowest keys."""
        if self._count <= self.capacity:
            return
        best = np.sort(np.argpartition(self._keys[: self._count], self.capacity - 1)[: self.capacity])
        self._rows[: self.capacity] = self._rows[best]
        self._ranks[: self.capacity] = self._ranks[best]
        self._keys[: self.capacity] = self._keys[best]
        self._count = self.capacity
        self._limit = float(self._keys[: self.capacity].max())


def draw_accesses(
    rows: Int64Array, times: Int64Array, at_most: int, random: np.random.Generator
) -> tuple[Int64Array, float]:
    """Draw uniformly, without replacement, from accesses counted by row.

    The draw must be independent of other messages and of the order of the rows, because the affinity of a table is
    estimated from how often two sampled accesses of a row come from one node.

    Args:
        rows, times: int64[n], ``times`` accesses of each row.
        at_most: accesses to draw.

    Returns:
        (row of each drawn access, accesses that each drawn one represents).
    """
    ends = np.cumsum(times)
    accesses = int(ends[-1]) if len(ends) else 0
    if accesses <= at_most:
        return np.repeat(rows, times), 1.0
    places = random.choice(accesses, at_most, replace=False, shuffle=False)
    return rows[np.searchsorted(ends, places, side="right")], accesses / at_most


def warm_up() -> None:
    """Compile the kernel (or load it from numba's cache)."""
    for ids in (np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)):
        AccessSample(1, 0).add(ids, 0, 0.0, 1)
