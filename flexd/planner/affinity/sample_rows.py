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
        distinct, rows = np.unique(keys, return_inverse=True)
        codes = np.unique(samples * np.int64(max(1, len(distinct))) + rows.reshape(-1))
        sample, row = np.divmod(codes, max(1, len(distinct)))
        offsets = np.zeros(total + 1, dtype=np.int64)
        np.cumsum(np.bincount(sample, minlength=total), out=offsets[1:])
        return cls(distinct.astype(np.int64), offsets, row.astype(np.int32))

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
        used, rows = np.unique(self.rows, return_inverse=True)
        return SampleRows(self.keys[used], self.offsets, rows.reshape(-1).astype(np.int32))

    def matrix(self) -> csr_matrix:
        """Return float32 [samples, rows] with a one for each row of each sample."""
        from scipy.sparse import csr_matrix

        ones = np.ones(len(self.rows), dtype=np.float32)
        return csr_matrix((ones, self.rows, self.offsets), shape=(len(self), len(self.keys)))
