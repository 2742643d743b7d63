"""The co-access sample as the planner's input: the distinct rows of each sample, in batches of the job's size, and what
rows cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flexd.core.arrays import Float32Array, Int32Array, Int64Array, first_of_run, places_of_runs
from flexd.core.keyspace import KeySpace
from flexd.core.sharding_types import ROW_WISE
from flexd.sketch.coaccess import CoAccess

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

# Keys of a range up to so many times their number are numbered by a table of the range instead of by sorting.
_DENSE = 8
# An id there and back beside a row.
_ID_BYTES = 8


def sorted_distinct(values: Int64Array) -> Int64Array:
    """Return the distinct values, ascending. ``numpy.unique`` hashes, which takes several times as long."""
    ordered = np.sort(values)
    return ordered[first_of_run(ordered)]


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
        """
        total = int(samples.max(initial=-1)) + 1 if count is None else count
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
        at = places_of_runs(self.offsets[chosen], lengths)
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


@dataclass(frozen=True)
class RowCosts:
    """Costs by row of a window.

    Attributes:
        weight: float32 [rows], bytes of a row that crosses, over ``SampledWindow.row_bytes``.
        min_gain: float32 [rows], weighted touches a batch that a move must win.
        stored_bytes: float32 [rows], memory of a row with its optimizer state.
    """

    weight: Float32Array
    min_gain: Float32Array
    stored_bytes: Float32Array

    def of(self, chosen: Int64Array) -> RowCosts:
        """Return the costs of the chosen rows, in that order."""
        return RowCosts(self.weight[chosen], self.min_gain[chosen], self.stored_bytes[chosen])


@dataclass(frozen=True)
class SampledWindow:
    """Sampled training samples in order of event time, oldest first.

    Attributes:
        rows: of each sample, over keys of the key space.
        user: int64 [samples], ``NO_USER`` where it is not known.
        batch: int64 [samples], from 0: batches of the job's size, the newest whole. Sampled samples stand for others
            that were trained at the same time, so a batch here is spread over more time than one of the job.
        batch_samples: samples of a global batch.
        row_bytes, costs: bytes of a row that crosses, and by row what it weighs and what a move costs.
    """

    rows: SampleRows
    user: Int64Array
    batch: Int64Array
    batch_samples: int
    row_bytes: float
    costs: RowCosts

    @property
    def batches(self) -> int:
        """Whole batches."""
        return int(self.batch.max(initial=-1)) + 1

    def of_batches(self, first: int, end: int) -> SampledWindow:
        """Return the batches from ``first`` to before ``end``, over the keys that they use."""
        chosen = np.flatnonzero((self.batch >= first) & (self.batch < end))
        rows = self.rows.select(chosen)
        used = np.unique(rows.rows)
        return SampledWindow(
            rows.compact(), self.user[chosen], self.batch[chosen] - first, self.batch_samples, self.row_bytes,
            self.costs.of(used.astype(np.int64)),
        )  # fmt: skip


def sampled_window(
    coaccess: CoAccess, keyspace: KeySpace, *, horizon_steps: float, batch_samples: int | None = None,
    accesses_per_step: float | None = None,
) -> SampledWindow:  # fmt: skip
    """Return the sampled window in batches of the job's size, of row-wise tables alone.

    Args:
        horizon_steps: steps over which moving a row must pay for itself.
        batch_samples: of a global batch; None: from ``accesses_per_step`` and the samples' mean length.
        accesses_per_step: of the whole job, over the sampled tables.
    """
    if batch_samples is None:
        mean = len(coaccess.rows) / max(1, coaccess.samples)
        batch_samples = max(1, round((accesses_per_step or 0.0) / max(1.0, mean)))
    # A table with another sharding type keeps it.
    spread = np.array([keyspace.tables[keyspace.index[name]].sharding == ROW_WISE for name in coaccess.tables])
    lengths = np.where(spread[coaccess.table], np.diff(coaccess.offsets), 0)
    kept = np.repeat(spread[coaccess.table], np.diff(coaccess.offsets))
    first = keyspace.first_key[np.array([keyspace.index[name] for name in coaccess.tables], dtype=np.int64)]
    keys = coaccess.rows[kept] + np.repeat(first[coaccess.table], lengths)
    left = coaccess.samples % batch_samples if coaccess.samples >= batch_samples else 0
    sample = np.repeat(coaccess.sample, lengths)
    begin = int(np.searchsorted(sample, left))
    count = coaccess.samples - left
    rows = SampleRows.of(sample[begin:] - left, keys[begin:], count)
    row_bytes, costs = row_costs(keyspace, rows.keys, horizon_steps)
    return SampledWindow(rows, coaccess.user[left:], np.arange(count) // batch_samples, batch_samples, row_bytes, costs)


def row_costs(keyspace: KeySpace, keys: Int64Array, horizon_steps: float) -> tuple[float, RowCosts]:
    """Return the bytes of a row that crosses in a step (values, gradient, ids), and what rows cost by key.

    A re-homed row travels once with its optimizer state, and must save as many bytes within the horizon.
    """
    crossing = np.array([2 * spec.row_bytes + _ID_BYTES for spec in keyspace.tables], dtype=np.float64)
    stored = np.array([spec.row_bytes + spec.state_bytes for spec in keyspace.tables], dtype=np.float64)
    largest = float(crossing.max())
    table = keyspace.table_of(keys)
    return largest, RowCosts(
        (crossing / largest)[table].astype(np.float32),
        (stored / (largest * horizon_steps))[table].astype(np.float32),
        stored[table].astype(np.float32),
    )
