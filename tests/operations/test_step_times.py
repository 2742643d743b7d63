"""Steps by placement version and in blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexd.control.protocol.report import PlacementState, StepReport
from flexd.operations import step_times
from flexd.operations.step_times import StepBlocks, StepTimes, trimmed_mean


def report(version: int, seconds: float, steps: int = 1, apply_seconds: float = 0.0) -> StepReport:
    return StepReport(1, steps, PlacementState(version, 0), seconds, apply_seconds, (0, 0, 0))


def test_steps_count_at_the_version_that_they_ran_at_and_without_chunks() -> None:
    times = StepTimes()
    for rank in range(4):
        times.add(rank, report(3, 0.5))  # The first report of a rank may span a change of version.
        for seconds in (0.1, 0.3):
            times.add(rank, report(3, seconds))
        times.add(rank, report(3, 5.0, steps=3, apply_seconds=0.01))
    times.add(0, report(4, 9.0))
    times.add(0, report(4, 0.05))
    at_3, at_4 = times.at_version(3), times.at_version(4)
    assert at_3 is not None
    assert at_4 is not None
    assert at_3[0] == pytest.approx(0.2)
    assert (at_4[0], math.isnan(at_4[1])) == (pytest.approx(0.05), True), "one report has no spread"
    assert times.at_version(5) is None
    times.clear()
    assert times.at_version(3) is None


def test_the_error_is_that_of_a_step_however_steps_are_reported() -> None:
    """Ranks share their steps: more of them make the mean no more certain."""
    rng = np.random.default_rng(1)
    seconds = rng.normal(0.1, 0.02, 900)
    times = StepTimes()
    for rank in range(3):
        times.add(rank, report(1, 1.0))
    start = 0
    for steps in rng.integers(1, 4, 300).tolist():
        part = seconds[start : start + steps]
        start += len(part)
        for rank in range(3):
            times.add(rank, report(1, float(part.sum()), len(part)))
    measured = times.at_version(1)
    assert measured is not None
    assert measured[0] == pytest.approx(seconds[:start].mean())
    assert measured[1] == pytest.approx(0.02 / math.sqrt(start), rel=0.15)


def test_old_steps_and_old_versions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "RECENT_STEPS", 10)
    monkeypatch.setattr(step_times, "MAX_VERSIONS", 2)
    times = StepTimes()
    for seconds in (1.0,) * 31 + (2.0,) * 40:
        times.add(0, report(1, seconds))
    measured = times.at_version(1)
    assert measured is not None
    assert measured[0] == pytest.approx(2.0, rel=0.01)
    for version in (2, 3):
        times.add(0, report(version, 1.0))
        times.add(0, report(version, 1.0))
    assert times.at_version(1) is None
    assert times.at_version(3) is not None


def block_report(version: int, seconds: float, steps: int = 2, apply_seconds: float = 0.0) -> StepReport:
    return StepReport(1, steps, PlacementState(version, 0), seconds * steps, apply_seconds, (1, 0, 0))


def test_a_block_has_clean_steps_of_every_rank_and_counts_the_busiest() -> None:
    blocks = StepBlocks()
    blocks.begin(7, 8)
    for rank in (0, 1):
        blocks.add(rank, block_report(6, 9.0))
        blocks.add(rank, block_report(7, 9.0, apply_seconds=0.5))
        blocks.add(rank, block_report(7, 9.0))
    for number in range(4):
        assert blocks.seconds(2) is None, number
        blocks.add(0, block_report(7, 1.0))
        blocks.add(1, block_report(7, 1.5))
    assert blocks.seconds(2) == pytest.approx(1.5)
    assert blocks.seconds(3) is None, "a rank has not reported"
    assert blocks.steps() == 14
    blocks.begin(7, 8)
    assert blocks.seconds(2) is None
    for _ in range(4):
        blocks.add(0, block_report(7, 2.0))
        blocks.add(1, block_report(7, 1.0))
    assert blocks.seconds(2) == pytest.approx(2.0), "a further block at the same version needs no wait"
    blocks.begin(8, 2)
    blocks.add(0, block_report(7, 1.0, steps=100))
    assert blocks.seconds(1) is None, "of another version"


def test_the_trimmed_mean_leaves_pauses_out() -> None:
    even = [(2, 2.0)] * 8
    assert trimmed_mean(even) == pytest.approx(1.0)
    assert trimmed_mean([*even, (2, 500.0), (1, 0.01)]) == pytest.approx(1.0)
    assert trimmed_mean([(1, 1.0), (3, 6.0)]) == pytest.approx((0.05 * 1.0 + 0.55 * 2.0) / 0.6)
