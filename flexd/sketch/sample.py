"""A bounded sample of accesses, weighted by their decayed weight: what the tail of a count-min table is read from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.errors import SketchError

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


class AccessSample:
    """Keeps the accesses with the lowest ``Exp(1) / weight`` (Efraimidis and Spirakis, *Weighted random sampling with
    a reservoir*, IPL 2006; with forward decay as in Cormode et al. 2009, section 4).

    The share of anything that a sample of n shows has a standard error of ``sqrt(p (1 - p) / n)``, at most 0.2 % for
    65,536. Keys are kept as logarithms, so they need no rescaling. Only the accesses that enter cost anything: their
    number is drawn first (binomial), then which they are. Two samples merge into a sample of both streams.

    Args:
        capacity: accesses kept (up to twice that between trims).
        seed: of the draws; equal streams give equal samples.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        if capacity < 1:
            raise SketchError(f"sample of {capacity} accesses", remedy="keep at least one")
        self.capacity = capacity
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._rows: Int64Array = np.empty(0, dtype=np.int64)
        self._keys: Float64Array = np.empty(0, dtype=np.float64)
        self._limit = math.inf
        """Accesses with a key above it are not in the sample."""

    @staticmethod
    def bytes_of(capacity: int) -> int:
        """Memory of a full sample."""
        return 2 * 16 * capacity

    def add(self, rows: npt.NDArray[np.int32] | Int64Array, log_weight: float, table_rows: int) -> None:
        """Offers accesses of one event time.

        Args:
            rows: int32[n] or int64[n]; ids outside ``0..table_rows`` are left out.
            log_weight: natural logarithm of their forward weight.
        """
        step = max(4 * self.capacity, 65_536)
        for start in range(0, len(rows), step):
            self._add(rows[start : start + step], log_weight, table_rows)

    def _add(self, rows: npt.NDArray[np.int32] | Int64Array, log_weight: float, table_rows: int) -> None:
        n = len(rows)
        power = self._limit + log_weight
        chance = -math.expm1(-math.exp(power)) if power < 700 else 1.0
        if chance >= 1.0:
            picked = rows.astype(np.int64)
        else:
            picked = rows[self._random.integers(0, n, size=self._random.binomial(n, chance))].astype(np.int64)
        picked = picked[(picked >= 0) & (picked < table_rows)]
        if not len(picked):
            return
        # Exp(1) given that it is low enough to enter.
        draws = -np.log1p(-chance * self._random.random(len(picked)))
        keys = np.log(np.maximum(draws, 5e-324)) - log_weight
        self._rows = np.concatenate([self._rows, picked])
        self._keys = np.concatenate([self._keys, keys])
        if len(self._rows) > 2 * self.capacity:
            self._trim()

    def rows(self) -> Int64Array:
        """int64[n] sampled accesses as row ids (a row that is accessed often is there often)."""
        return self._rows

    def relabel(self, log_weight_change: float) -> None:
        """Counts what is sampled so far as of a time whose accesses weigh ``exp(log_weight_change)`` times as much."""
        self._keys = self._keys - log_weight_change
        self._limit -= log_weight_change

    def merge(self, other: AccessSample) -> None:
        self._limit = min(self._limit, other._limit)
        rows, keys = np.concatenate([self._rows, other._rows]), np.concatenate([self._keys, other._keys])
        kept = keys <= self._limit
        self._rows, self._keys = rows[kept], keys[kept]
        if len(self._rows) > 2 * self.capacity:
            self._trim()

    def copy(self) -> AccessSample:
        twin = AccessSample(self.capacity, 0)
        twin._random.bit_generator.state = self._random.bit_generator.state
        twin._rows, twin._keys, twin._limit = self._rows, self._keys, self._limit
        return twin

    def state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(random state and limit, {``sample_rows`` int64[n], ``sample_keys`` float64[n]})."""
        random: Any = self._random.bit_generator.state
        inner = random["state"]
        meta = {
            "sample_limit": self._limit.hex(),
            "sample_random": [f"{inner['state']:x}", f"{inner['inc']:x}"],
            "sample_random_half": [random["has_uint32"], random["uinteger"]],
        }
        return meta, {"sample_rows": self._rows.copy(), "sample_keys": self._keys.copy()}

    def load(self, meta: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], table_rows: int) -> None:
        """Takes over what ``state`` gave. Raises SketchError if it cannot be of this sample."""
        rows, keys = arrays["sample_rows"], arrays["sample_keys"]
        fits = (
            rows.dtype == np.int64
            and keys.dtype == np.float64
            and rows.shape == keys.shape
            and len(rows) <= 2 * self.capacity
            and (len(rows) == 0 or (int(rows.min()) >= 0 and int(rows.max()) < table_rows))
        )
        if not fits:
            raise SketchError(f"saved sample does not fit {self.capacity} accesses", remedy="start from empty counters")
        state, inc = (int(text, 16) for text in meta["sample_random"])
        half_there, half = (int(number) for number in meta["sample_random_half"])
        self._random.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": inc},
            "has_uint32": half_there,
            "uinteger": half,
        }
        self._limit = float.fromhex(meta["sample_limit"])
        self._rows, self._keys = rows.copy(), keys.copy()

    def _trim(self) -> None:
        best = np.sort(np.argpartition(self._keys, self.capacity - 1)[: self.capacity])
        self._rows, self._keys = self._rows[best], self._keys[best]
        self._limit = float(self._keys.max())
