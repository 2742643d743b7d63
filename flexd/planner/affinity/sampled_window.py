"""The co-access sample as the planner's input: samples over keys, in batches of the job's size, and what rows cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import KeySpace
from flexd.core.sharding_types import ROW_WISE
from flexd.planner.affinity.partition import RowCosts
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.sketch.coaccess import CoAccess

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_ID_BYTES = 8
"""An id there and back beside a row."""


@dataclass(frozen=True)
class SampledWindow:
    """Sampled training samples in order of event time, oldest first.

    Attributes:
        rows: of each sample, over keys of the key space.
        user: int64 [samples], ``NO_USER`` where it is not known.
        batch: int64 [samples], from 0: batches of the job's size, the newest whole. Sampled samples stand for others
            that were trained at the same time, so a batch here is spread over more time than one of the job.
        batch_samples: samples of a global batch.
        accesses_per_sample: mean look-ups of a sample, over all tables.
        row_bytes, costs: bytes of a row that crosses, and by row what it weighs and what a move costs.
    """

    rows: SampleRows
    user: Int64Array
    batch: Int64Array
    batch_samples: int
    accesses_per_sample: float
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
            rows.compact(), self.user[chosen], self.batch[chosen] - first, self.batch_samples,
            self.accesses_per_sample, self.row_bytes, self.costs.of(used.astype(np.int64)),
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

    Raises:
        ValueError: neither is given, or a number is not above 0.
    """
    mean = len(coaccess.rows) / max(1, coaccess.samples)
    if batch_samples is None:
        if accesses_per_step is None or not accesses_per_step > 0:
            raise ValueError("give the samples or the accesses of a global batch")
        batch_samples = max(1, round(accesses_per_step / max(1.0, mean)))
    if batch_samples < 1 or not horizon_steps > 0:
        raise ValueError(f"{batch_samples} samples per batch, a horizon of {horizon_steps} steps")
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
    return SampledWindow(
        rows, coaccess.user[left:], np.arange(count) // batch_samples, batch_samples, mean, row_bytes, costs
    )


def row_costs(keyspace: KeySpace, keys: Int64Array, horizon_steps: float) -> tuple[float, RowCosts]:
    """Return the bytes of a row that crosses in a step (values, gradient, ids), and what rows cost by key.

    A moved row travels once with its optimizer state, and must save as many bytes within the horizon.
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
