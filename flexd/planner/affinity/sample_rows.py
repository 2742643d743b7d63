"""The distinct rows of each sample, as one sparse array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


_DENSE = 8
"""Keys of a range up to so many times their number are numbered by a table of the range instead of by sorting."""


def sorted_distinct(values: Int64Array) -> Int64Array:
    """Return the distinct values, ascending. ``numpy.unique`` hashes, which takes several times as long."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def _numbered(keys: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return (distinct keys ascending, place of each key among them)."""
    least, most = int(keys.min(initial=0)), int(keys.max(initial=-1))
    if least < 0 or most > _DENSE * len(keys):
        distinct, places = np.unique(keys, return_inverse=True)
        return distinct.astype(np.int64), places.reshape(-1).astype(np.int64)
    there = np.zeros(most + 1, dtype=np.bool_)
    there[keys] = True
    number = np.cumsum(there, dtype=np.int64) - 1
    return np.flatnonzero(there), number[keys]


@dataclass(frozen=True)
class SampleRows:
    """Rows that occur together.

    Attributes:
        keys: int64 [rows], distinct and ascending: the rows that occur.
        offsets: int64 [samples + 1], where the rows of each sample begin in ``rows``.
        rows: int32 [n], indices into ``keys``, distinct within a sample.
    """

    keys: Int64Array
    offsets: Int64Array
    rows: Int32Array

    @classmethod
    def of(cls, samples: Int64Array, keys: Int64Array, count: int | None = None) -> SampleRows:
        """Return the samples of a stream of accesses, with each row of a sample once.

        Args:
            samples: int64 [accesses], from 0, the sample of each access, in any order.
            keys: int64 [accesses].
            count: number of samples; None: the largest of ``samples`` plus one.

        Raises:
            ValueError: the vectors differ in length, or a sample is negative or not below ``count``.
        """
        if samples.shape != keys.shape or samples.ndim != 1:
            raise ValueError(f"samples {samples.shape} and keys {keys.shape} must be vectors of equal length")
        largest = int(samples.max(initial=-1))
        total = largest + 1 if count is None else count
        if largest >= total or samples.min(initial=0) < 0:
            raise ValueError(f"samples are {samples.min()} to {largest}, of {total}")
        distinct, rows = _numbered(keys)
        codes = sorted_distinct(samples * np.int64(max(1, len(distinct))) + rows)
        sample, row = np.divmod(codes, max(1, len(distinct)))
        offsets = np.zeros(total + 1, dtype=np.int64)
        np.cumsum(np.bincount(sample, minlength=total), out=offsets[1:])
        return cls(distinct, offsets, row.astype(np.int32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64Array:
        """int64 [samples]: distinct rows of each sample."""
        return np.diff(self.offsets)

    @property
    def samples(self) -> Int64Array:
        """int64 [n]: the sample of each entry of ``rows``."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def select(self, chosen: Int64Array) -> SampleRows:
        """Return the chosen samples, in that order, over the same keys."""
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(self.offsets[chosen] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return SampleRows(self.keys, offsets, self.rows[at])

    def compact(self) -> SampleRows:
        """Return the same samples with no keys but those that occur."""
        used, rows = _numbered(self.rows.astype(np.int64))
        return SampleRows(self.keys[used], self.offsets, rows.astype(np.int32))

    def matrix(self) -> csr_matrix:
        """Return float32 [samples, rows] with a one for each row of each sample."""
        from scipy.sparse import csr_matrix

        ones = np.ones(len(self.rows), dtype=np.float32)
        return csr_matrix((ones, self.rows, self.offsets), shape=(len(self), len(self.keys)))
