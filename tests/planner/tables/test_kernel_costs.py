"""Learned kernel costs on kernels of a known law: held-out error, monotony, and beyond the data."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.planner.tables.kernel_costs import DIMS_TERM, TERMS, KernelCosts, analytic_bytes, work_of
from tests.support.kernel_sets import measured, physical_law, stepped_law


@pytest.fixture(scope="module")
def stepped() -> KernelCosts:
    return KernelCosts.learned(measured(stepped_law, 120))


def test_a_sum_of_terms_predicts_sets_that_it_was_not_fitted_to(stepped: KernelCosts) -> None:
    found = KernelCosts.learned(measured(physical_law, 120))
    assert all(phase.error.median < 0.05 for phase in found.phases)
    assert all(0.05 < phase.error.median < 0.5 for phase in stepped.phases)
    by_bytes = KernelCosts.learned(measured(lambda work: analytic_bytes(work)[:, 1] * 1e-10, 60)).phases[1]
    assert by_bytes.error.median < 0.02


def test_seconds_grow_with_every_term(stepped: KernelCosts) -> None:
    work = work_of(stepped.measurements)
    rng = np.random.default_rng(2)
    for term in range(len(TERMS)):
        more = work.copy()
        more[:, term] *= rng.uniform(1.0, 5.0, len(work))
        assert (stepped.seconds(more) >= stepped.seconds(work) * (1 - 1e-12)).all(), TERMS[term]
    both = work + work[rng.permutation(len(work))]
    both[:, DIMS_TERM] = np.maximum(work[:, DIMS_TERM], both[:, DIMS_TERM] / 2)
    assert (stepped.seconds(both) >= stepped.seconds(work) * (1 - 1e-12)).all()


def test_beyond_the_data_seconds_grow_with_the_bytes(stepped: KernelCosts) -> None:
    phase = stepped.phases[0]
    edge = phase.most[None]
    far = 10 * edge
    np.testing.assert_allclose(phase.seconds(far) / phase.seconds(edge), 10.0)
    np.testing.assert_allclose(phase.measured_share(far), 0.1)
    assert phase.measured_share(edge) == 1.0
    assert phase.seconds(np.zeros((1, len(TERMS))))[0] == 0.0
