"""The exposure of communication in prices, from what ranks report."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from flexd.control.protocol.report import PhaseReport, PhasesReport
from flexd.operations.step_times import priced_by
from flexd.operations.training_monitor import TrainingMonitor
from flexd.topology.cluster import Exposed
from tests.support.components import report
from tests.support.planner_cases import cluster
from tests.support.planning_harness import filled_harness


def monitor(rows: float, push: float, cover: float, *, overlapped: float = 1.0, steps: int = 10) -> TrainingMonitor:
    training = TrainingMonitor()
    add(training, rows, push, cover, overlapped=overlapped, steps=steps)
    return training


def add(
    training: TrainingMonitor, rows: float, push: float, cover: float, *, overlapped: float = 1.0, steps: int = 10
) -> None:
    phases = (
        PhaseReport("rows", inter_seconds=steps * rows, overlapped_seconds=steps * rows * overlapped),
        PhaseReport("push", inter_seconds=steps * push),
    )
    for rank in range(2):
        training.add(rank, replace(report(1), phases=PhasesReport(phases, steps, steps * cover)))


def test_shares_and_cover_are_what_ranks_measured() -> None:
    exposed = monitor(0.3, 0.1, 0.2, overlapped=0.75).exposed()
    assert exposed is not None
    assert exposed.forward == pytest.approx(0.25)
    assert exposed.backward == 1.0
    assert exposed.sync == pytest.approx(1 - 0.75 * 0.3 / 0.4), "no replicas yet: as the whole"
    assert exposed.cover_seconds == pytest.approx(0.2)
    machine = cluster(exposed=Exposed(1.0, 0.5, 0.5))
    priced = priced_by(machine, exposed)
    assert priced.exposed == exposed
    assert (
        priced.name == f"{machine.name} (measured: outside compute forward 0.25, backward 1.00, sync 0.44; "
        "200 ms cover the rest)"
    )


def test_noise_does_not_change_prices() -> None:
    training = monitor(0.3, 0.1, 0.2)
    first = training.exposed()
    add(training, 0.3, 0.1, 0.205, overlapped=0.98, steps=50)
    assert training.exposed() is first
    add(training, 0.3, 0.1, 0.1, overlapped=1.0, steps=50)
    changed = training.exposed()
    assert changed is not None
    assert changed.cover_seconds == pytest.approx(0.1)


def test_plans_use_the_measured_exposure(tmp_path: Path) -> None:
    """Ranks that report everything beside long compute get a plan that moves nothing."""
    harness = filled_harness(tmp_path)
    assert harness.propose("before reports").plan.promotions > 0
    names = ("ids", "rows", "push", "sync")
    phases = tuple(PhaseReport(name, inter_seconds=1.0, overlapped_seconds=1.0) for name in names)
    for rank in range(4):
        harness.training.add(rank, replace(report(2, tiers=(200_000, 0, 0)), phases=PhasesReport(phases, 1, 1000.0)))
    plan = harness.propose("after them").plan
    assert plan.promotions == 0
    assert plan.costs.before.exposed_seconds == 0
    assert "1e+06 ms cover the rest" in plan.costs.cluster.name
    assert math.isfinite(plan.costs.cluster.exposed.cover_seconds)
