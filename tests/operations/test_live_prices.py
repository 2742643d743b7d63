"""The prices of plans: curves corrected by the steps of the live ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexd.config.load import parse_config
from flexd.config.planner import PlannerConfig
from flexd.config.reload import is_hot
from flexd.control.protocol.report import PhaseReport, StepReport
from flexd.operations.live_prices import MIN_STEPS, STALE_REPORTS, LivePrices
from flexd.operations.price_samples import PricedCurve
from flexd.operations.training_monitor import TrainingMonitor
from flexd.planner.model.price_correction import MIN_REPORTS, Correction
from flexd.planner.model.row_bytes import TrafficLink
from flexd.topology.cluster import Collective, Link
from tests.support.components import report
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.planner_cases import cluster
from tests.support.planning_harness import filled_harness

MACHINE = cluster(all_to_all=1e9, all_reduce=2e9, intra=10e9, latency=1e-4)
MEGABYTES = {"ids": 0.1, "rows": 4.0, "push": 4.0}


def config_of(dtype: str = "float32", **planner: Any) -> Any:
    table = {"name": "item", "rows": 100, "dim": 4, "dtype": dtype}
    return parse_config({"job": "j", "tables": [table], "stream": {"source": {"kind": "tap"}}, "planner": planner})


def prices_of(coordinator: FakeCoordinator, dtype: str = "float32", **planner: Any) -> LivePrices:
    config = config_of(dtype, **planner)
    return LivePrices(config.planner, config.keyspace(), MACHINE, TrainingMonitor(), coordinator)


def step_report(
    factor: float, *, steps: int = 10, exchange: str = "chain", intra: float = 1.0, sync: float = 0.0
) -> StepReport:
    """Steps of 0.5 s in which all collectives between nodes take ``factor`` times what the curve says."""
    phases = [
        PhaseReport(
            name,
            inter_seconds=steps * factor * (1e-4 * (2 if name == "ids" else 1) + size * 1e6 / 1e9),
            inter_bytes=int(steps * size * 1e6), inter_collectives=steps * (2 if name == "ids" else 1),
            intra_seconds=steps * intra * (1e-4 + size * 1e6 / 10e9), intra_bytes=int(steps * size * 1e6),
            intra_collectives=steps,
        )
        for name, size in MEGABYTES.items()
    ]  # fmt: skip
    if sync:
        phases.append(
            PhaseReport(
                "sync", inter_seconds=steps * sync * (1e-4 + 2e6 / 2e9), inter_bytes=steps * 2_000_000,
                inter_collectives=steps,
            )
        )  # fmt: skip
    return replace(report(1, steps=steps), phases=tuple(phases), phase_steps=steps, exchange=exchange)


def teach(prices: LivePrices, factor: float, times: int = 2 * MIN_REPORTS, world: int = 4, **more: Any) -> None:
    for _ in range(times):
        for rank in range(world):
            prices.add(rank, step_report(factor, **more))


def test_corrected_prices_are_used_once_they_predict_better() -> None:
    prices = prices_of(FakeCoordinator())
    teach(prices, 3.0, MIN_REPORTS - 1)
    assert prices.cluster is MACHINE
    teach(prices, 3.0, 20)
    corrected = prices.cluster
    for collective in Collective:
        before, after = (of.curve(Link.INTER_NODE, collective) for of in (MACHINE, corrected))
        assert after.seconds(1e6) == pytest.approx(3 * before.seconds(1e6), rel=0.1)
    assert corrected.intra_node == MACHINE.intra_node, "the curve holds there"
    assert corrected.name.startswith("test (corrected: all-to-all between nodes x2.")
    assert MACHINE.name == "test"


def test_with_false_corrections_are_learnt_and_not_used() -> None:
    prices = prices_of(FakeCoordinator(), correct_prices=False)
    teach(prices, 3.0)
    assert prices.cluster is MACHINE
    assert prices.corrections()[PricedCurve.INTER_ALL_TO_ALL].correction is Correction.COMMON
    prices.apply_config(PlannerConfig(correct_prices=True))
    assert "corrected" in prices.cluster.name
    assert is_hot("planner.correct_prices")


def test_all_ranks_and_enough_steps_are_needed() -> None:
    prices = prices_of(FakeCoordinator())
    for _ in range(50):
        for rank in range(3):
            prices.add(rank, step_report(3.0))
    assert prices.corrections() == {}
    prices.add(3, step_report(3.0, steps=MIN_STEPS - 1))
    assert prices.corrections() == {}
    prices.add(3, step_report(3.0, steps=1))
    assert prices.corrections()[PricedCurve.INTER_ALL_TO_ALL].reports == 1
    short = replace(step_report(3.0), step_seconds=0.01)
    for rank in range(4):
        prices.add(rank, short)
    assert prices.corrections()[PricedCurve.INTER_ALL_TO_ALL].reports == 1, "less than a second of training"


def test_an_all_reduce_has_its_own_factor_while_steps_show_it() -> None:
    prices = prices_of(FakeCoordinator())
    teach(prices, 3.0, 20, sync=1.0)
    reduce = MACHINE.curve(Link.INTER_NODE, Collective.ALL_REDUCE)
    assert prices.cluster.curve(Link.INTER_NODE, Collective.ALL_REDUCE) == reduce
    teach(prices, 3.0, STALE_REPORTS)
    later = prices.cluster.curve(Link.INTER_NODE, Collective.ALL_REDUCE)
    assert later.seconds(1e6) == pytest.approx(3 * reduce.seconds(1e6), rel=0.1), "as its link"


def test_plans_and_their_drift_are_priced_with_them(tmp_path: Path) -> None:
    harness = filled_harness(tmp_path)
    before = harness.propose("as probed", dry_run=True).plan
    probed = harness.prices.cluster
    rows = probed.curve(Link.INTER_NODE, Collective.ALL_TO_ALL)
    for _ in range(20):
        for rank in range(4):
            seconds = 4 * rows.seconds(1e4)
            phases = (PhaseReport("rows", inter_seconds=10 * seconds, inter_bytes=100_000, inter_collectives=10),)
            harness.prices.add(rank, replace(report(1, steps=10), phases=phases, phase_steps=10, exchange="chain"))
    after = harness.propose("corrected", dry_run=True).plan
    assert after.cluster.name.startswith(f"{probed.name} (corrected: all-to-all between nodes x")
    for link, factor in ((TrafficLink.INTRA_NODE, 1.0), (TrafficLink.INTER_NODE, 4.0)):
        seconds = [float(plan.before.phase_seconds[:, link].sum()) for plan in (before, after)]
        assert seconds[0] > 0
        assert seconds[1] == pytest.approx(factor * seconds[0], rel=0.15 if factor > 1 else 1e-9)
