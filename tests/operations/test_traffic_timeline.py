"""Traffic of the ranks in intervals: sums, a clock that is set back, and the limit of intervals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexd.control.protocol.report import StepReport
from flexd.operations.training_monitor import INTERVAL_SECONDS, MAX_SAMPLES, TrafficInterval, TrafficTimeline


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=10 * INTERVAL_SECONDS)


@pytest.fixture
def timeline(clock: SimpleNamespace) -> TrafficTimeline:
    return TrafficTimeline(lambda: clock.now)


def report(scale: int = 1) -> StepReport:
    """Return a report whose every figure differs from the others."""
    return StepReport(
        step=1, steps=2 * scale, placement_version=0, placement_digest=0, step_seconds=0.5 * scale, apply_seconds=0.0,
        accesses_by_tier=(3 * scale, 5 * scale, 7 * scale), all_to_all_intra_bytes=11 * scale,
        all_to_all_inter_bytes=13 * scale, sync_intra_bytes=17 * scale, sync_inter_bytes=19 * scale,
        migration_intra_bytes=23 * scale, migration_inter_bytes=29 * scale,
    )  # fmt: skip


def test_reports_of_one_interval_are_added_up_by_kind(timeline: TrafficTimeline, clock: SimpleNamespace) -> None:
    timeline.add(report())
    clock.now += 0.99 * INTERVAL_SECONDS
    timeline.add(report(2))
    assert timeline.intervals() == (
        TrafficInterval(
            index=10, steps=6, step_seconds=1.5, accesses_by_tier=(9, 15, 21), intra_bytes=3 * (11 + 17),
            all_to_all_inter_bytes=3 * 13, sync_inter_bytes=3 * 19, migration_bytes=3 * (23 + 29),
        ),
    )  # fmt: skip


def test_a_clock_that_was_set_back_adds_to_the_newest_interval(
    timeline: TrafficTimeline, clock: SimpleNamespace
) -> None:
    timeline.add(report())
    clock.now += INTERVAL_SECONDS
    timeline.add(report())
    clock.now -= 5 * INTERVAL_SECONDS
    timeline.add(report())
    assert [(each.index, each.steps) for each in timeline.intervals()] == [(10, 2), (11, 4)]


def test_the_oldest_intervals_are_dropped(timeline: TrafficTimeline, clock: SimpleNamespace) -> None:
    for _ in range(MAX_SAMPLES + 3):
        timeline.add(report())
        clock.now += INTERVAL_SECONDS
    indices = [each.index for each in timeline.intervals()]
    assert indices == list(range(13, 13 + MAX_SAMPLES))
