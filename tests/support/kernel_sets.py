"""Measurements of kernels of a known law."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from flexd.planner.tables.kernel_costs import (
    IDS,
    PHASES,
    SUM_BYTES,
    TERMS,
    HeldOutError,
    KernelCosts,
    PhaseCosts,
    PhysicalModel,
    work_of,
)
from flexd.topology.kernel_design import KernelRange, designed_sets
from flexd.topology.kernel_file import KernelMeasurements

FIXED = 2e-5


def measured(law, sets: int = 200) -> KernelMeasurements:
    """Measurements of kernels whose seconds are ``law(work)`` for both phases, within 2 %."""
    rng = np.random.default_rng(1)
    chosen = tuple(
        replace(one, distinct=np.minimum(one.ids, one.rows) * (1 - 0.5 * one.skew / 1.4))
        for one in islice(designed_sets(KernelRange()), sets)
    )
    nothing = np.ones(sets)
    empty = KernelMeasurements("fbgemm", "cpu", "made up", chosen, nothing, nothing)
    seconds = law(work_of(empty)) * rng.uniform(0.98, 1.02, (sets, 2)).T
    return replace(empty, look_up_seconds=seconds[0], update_seconds=seconds[1])


def physical_law(work: np.ndarray) -> np.ndarray:
    return FIXED + 3e-6 * work[:, 0] + 2e-9 * work[:, IDS] + 1e-10 * work[:, SUM_BYTES]


def stepped_law(work: np.ndarray) -> np.ndarray:
    """Twice as slow once the tables leave a cache."""
    return physical_law(work) * np.where(work[:, TERMS.index("stored_bytes")] > 2**24, 2.0, 1.0)


def known_costs(by_table: float, by_id: float, by_dim: float = 0.0) -> KernelCosts:
    """Kernels that cost so many seconds a table, an id and a dim, measured everywhere."""
    terms = np.zeros(1 + len(TERMS))
    terms[1], terms[1 + IDS], terms[-1] = by_table, by_id, by_dim
    phases = tuple(
        PhaseCosts(at, PhysicalModel(terms), HeldOutError(0.0, 0.0), np.zeros(len(TERMS)), np.full(len(TERMS), 1e18))
        for at in range(len(PHASES))
    )
    return KernelCosts(KernelMeasurements("fbgemm", "cpu", "", (), *(np.zeros(0),) * 2), phases)
