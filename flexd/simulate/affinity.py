"""What homes and dealing by affinity would win on the samples of a trace or of a stream."""

from __future__ import annotations

import numpy as np

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.planner.affinity.outlook import AffinityOutlook
from flexd.planner.affinity.sampled_window import sampled_window
from flexd.planner.affinity.streaming import plan_affinity
from flexd.simulate.accesses import Accesses, TraceAccesses
from flexd.sketch.coaccess import NO_USER, CoAccess

MAX_STEPS = 64
"""Newest steps that are used: the daemon's sample remembers no longer than some half-lives either."""
HORIZON_STEPS = 1000.0
"""Steps over which a moved row must pay for its move."""


def affinity_outlook(accesses: Accesses, layout: RankLayout) -> AffinityOutlook | None:
    """Return the outlook of a trace; None for accesses that are drawn row by row, and with one node.

    The newest quarter of the steps (at most eight) is judged by what those before it show, as the daemon does.
    """
    if not isinstance(accesses, TraceAccesses) or layout.nodes < 2:
        return None
    batches = accesses.batches
    first = max(0, batches.steps - MAX_STEPS)
    numbers, tables, rows = batches.samples_of(first, batches.steps)
    size = batches.samples_per_step
    # A part is the rows of one table in one sample.
    order = np.lexsort((tables, numbers))
    numbers, tables, rows = numbers[order], tables[order], rows[order]
    new = np.append(True, (np.diff(numbers) != 0) | (np.diff(tables) != 0)) if len(rows) else np.zeros(0, np.bool_)
    starts = np.flatnonzero(new)
    count = (batches.steps - first) * size
    sampled = CoAccess(
        tuple(spec.name for spec in accesses.keyspace.tables),
        np.array([spec.rows for spec in accesses.keyspace.tables], dtype=np.int64),
        numbers[starts], tables[starts], np.append(starts, len(rows)), rows, np.arange(count, dtype=np.float64),
        np.full(count, NO_USER), count, 0,
    )  # fmt: skip
    window = sampled_window(sampled, accesses.keyspace, horizon_steps=HORIZON_STEPS, batch_samples=size)
    return AffinityOutlook.of(plan_affinity(window, layout), count)


def outlook_of_samples(
    sampled: CoAccess, keyspace: KeySpace, layout: RankLayout, accesses_per_step: float
) -> AffinityOutlook | None:
    """Return the outlook of training samples of a stream; None with one node, or without any sample.

    Args:
        accesses_per_step: of the whole job.
    """
    if layout.nodes < 2 or not sampled.samples:
        return None
    window = sampled_window(sampled, keyspace, horizon_steps=HORIZON_STEPS, accesses_per_step=accesses_per_step)
    return AffinityOutlook.of(plan_affinity(window, layout), sampled.samples)
