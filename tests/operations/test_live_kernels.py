"""Learned costs of kernels that what ranks report corrects."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client.core import Metric

from flexd.api.prices import prices_status
from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase
from flexd.operations.live_kernels import LiveKernels
from flexd.planner.model.price_correction import LARGEST_FACTOR, MIN_REPORTS, Correction
from tests.operations.test_live_prices import prices_of, teach
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.kernel_sets import measured, physical_law

EXPECTED = np.array([[1e-3, 4e-3], [2e-3, 3e-3], [1e-3, 2e-3], [1e-3, 1e-3]])
LOOK_UP = [StepPhase.ROWS]
UPDATE = [StepPhase.PUSH, StepPhase.UPDATE]


def steps(lookup: float, update: float) -> np.ndarray:
    """A mean step of four ranks that compute so many times what is expected; waiting is no kernel."""
    values = np.zeros((4, len(StepPhase), len(PHASE_QUANTITIES)))
    at = {phase: number for number, phase in enumerate(StepPhase)}
    for parts, factor, column in ((LOOK_UP, lookup, 0), (UPDATE, update, 1)):
        for part in parts:
            values[:, at[part], PHASE_QUANTITIES.index("computed_seconds")] = factor * EXPECTED[:, column] / len(parts)
            values[:, at[part], PHASE_QUANTITIES.index("exposed_seconds")] = 1.0
    values[:, at[StepPhase.DENSE], PHASE_QUANTITIES.index("computed_seconds")] = 1.0
    return values


@pytest.fixture(scope="module")
def measurements():
    return measured(physical_law, 60)


def test_kernels_that_take_longer_in_steps_cost_more(measurements) -> None:
    kernels = LiveKernels(measurements)
    kernels.learn(steps(3.0, 1.0))
    assert kernels.corrections()["lookup"].reports == 0, "nothing was expected yet"
    kernels.expect(EXPECTED)
    for _ in range(3 * MIN_REPORTS):
        kernels.learn(steps(3.0, 1.01))
    learnt = kernels.corrections()
    assert (learnt["lookup"].correction, learnt["update"].correction) == (Correction.COMMON, Correction.PROBED)
    plain, corrected = kernels.costs(corrected=False), kernels.costs(corrected=True)
    work = np.array([phase.most for phase in plain.phases])
    ratio = corrected.seconds(work) / plain.seconds(work)
    np.testing.assert_allclose(ratio[:, 0], 3.0, rtol=0.05)
    np.testing.assert_array_equal(ratio[:, 1], 1.0)
    np.testing.assert_allclose(corrected.phases[0].added(work), plain.phases[0].added(work) * ratio[:, 0])
    np.testing.assert_allclose(
        corrected.phases[0].measured_share(work), plain.phases[0].measured_share(work), err_msg="a share has no factor"
    )


def test_factors_are_bounded_decay_and_go_with_the_ranks(measurements) -> None:
    kernels = LiveKernels(measurements)
    kernels.expect(EXPECTED)
    for _ in range(3 * MIN_REPORTS):
        kernels.learn(steps(100.0, 2.0))
    assert kernels.corrections()["lookup"].factors[1] <= LARGEST_FACTOR
    for _ in range(6 * MIN_REPORTS):
        kernels.learn(steps(1.0, 2.0))
    assert kernels.costs(corrected=True).factors[0] == 1.0
    assert kernels.costs(corrected=True).factors[1] == pytest.approx(2.0, rel=0.05)
    before = kernels.corrections()
    kernels.expect(None)
    kernels.learn(steps(1.0, 2.0))
    kernels.expect(EXPECTED[:2])
    kernels.learn(steps(1.0, 2.0))
    assert kernels.corrections() == before, "rules are changing, or other ranks are predicted"
    kernels.forget()
    assert {known.reports for known in kernels.corrections().values()} == {0}


def test_reports_of_all_ranks_teach_and_status_and_metrics_show_it(measurements) -> None:
    prices = prices_of(FakeCoordinator())
    assert prices_status(prices).kernels == ()
    prices.kernels = LiveKernels(measurements)
    teach(prices, 1.0, 1)
    prices.kernels.expect(EXPECTED)
    teach(prices, 1.0, 2)
    assert prices.kernels.corrections()["update"].reports == 2
    for _ in range(3 * MIN_REPORTS):
        prices.kernels.learn(steps(1.0, 2.5))
    status = prices_status(prices)
    shown = {one.kernel: one for one in status.kernels}
    assert list(shown) == ["lookup", "update"]
    assert shown["update"].reason.startswith("all x2.")
    metrics: dict[str, Metric] = {family.name: family for family in status.metrics()}
    factors = {one.labels["kernel"]: one.value for one in metrics["flexd_kernel_price_factor"].samples}
    assert factors["update"] == shown["update"].factor > 2
    errors = {tuple(one.labels.values()): one.value for one in metrics["flexd_kernel_price_error"].samples}
    assert errors["update", "learned"] > errors["update", "corrected"]
