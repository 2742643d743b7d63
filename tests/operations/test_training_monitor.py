"""Step reports, averaged for the planner and summed for the metrics."""

from __future__ import annotations

import pytest

from flexd.control.protocol.report import PlacementState, SentBytes, StepReport
from flexd.operations.training_monitor import TrainingMonitor


def report(step: int, steps: int = 1, accesses: tuple[int, int, int] = (60, 30, 10), version: int = 0) -> StepReport:
    return StepReport(
        step=step, steps=steps, placement=PlacementState(version, 7), step_seconds=0.5 * steps,
        apply_seconds=0.1, accesses_by_tier=accesses, sent=SentBytes(1, 2, 3, 4, 5, 6),
    )  # fmt: skip


def test_the_average_follows_a_change_within_some_tens_of_steps() -> None:
    monitor = TrainingMonitor()
    monitor.add(0, report(1))
    for step in range(2, 302):
        monitor.add(0, report(step, accesses=(0, 0, 200)))
    assert monitor.accesses_per_step(1) == pytest.approx(200, rel=0.01)
    monitor.add(0, report(302, accesses=(0, 0, 10_200)))
    assert monitor.accesses_per_step(1) == pytest.approx(400, rel=0.01), "one odd step is a fiftieth of the average"
    monitor.add(0, report(402, steps=100, accesses=(0, 0, 5_000)))
    assert monitor.accesses_per_step(1) == 50, "a report of many steps stands for itself"


def test_a_new_generation_resets_averages_and_versions_but_not_totals() -> None:
    monitor = TrainingMonitor()
    monitor.add(3, report(5, version=2))
    assert monitor.versions() == {3: 2}
    monitor.new_generation()
    assert monitor.accesses_per_step(2) is None
    assert monitor.versions() == {}
    assert monitor.totals().newest_step == 5
