"""Blocks of steps at one placement version."""

from __future__ import annotations

import pytest

from flexd.control.protocol.report import PlacementState, StepReport
from flexd.operations.step_times import StepBlocks, trimmed_mean


def report(version: int, seconds: float, steps: int = 2, apply_seconds: float = 0.0) -> StepReport:
    return StepReport(1, steps, PlacementState(version, 0), seconds * steps, apply_seconds, (1, 0, 0))


def test_a_block_has_clean_steps_of_every_rank_and_counts_the_busiest() -> None:
    blocks = StepBlocks()
    blocks.begin(7, 8)
    for rank in (0, 1):
        blocks.add(rank, report(6, 9.0))
        blocks.add(rank, report(7, 9.0, apply_seconds=0.5))
        blocks.add(rank, report(7, 9.0))
    for number in range(4):
        assert blocks.seconds(2) is None, number
        blocks.add(0, report(7, 1.0))
        blocks.add(1, report(7, 1.5))
    assert blocks.seconds(2) == pytest.approx(1.5)
    assert blocks.seconds(3) is None, "a rank has not reported"
    assert blocks.steps() == 14
    blocks.begin(7, 8)
    assert blocks.seconds(2) is None
    for _ in range(4):
        blocks.add(0, report(7, 2.0))
        blocks.add(1, report(7, 1.0))
    assert blocks.seconds(2) == pytest.approx(2.0), "a further block at the same version needs no wait"
    blocks.begin(8, 2)
    blocks.add(0, report(7, 1.0, steps=100))
    assert blocks.seconds(1) is None, "of another version"


def test_the_trimmed_mean_leaves_pauses_out() -> None:
    even = [(2, 2.0)] * 8
    assert trimmed_mean(even) == pytest.approx(1.0)
    assert trimmed_mean([*even, (2, 500.0), (1, 0.01)]) == pytest.approx(1.0)
    assert trimmed_mean([(1, 1.0), (3, 6.0)]) == pytest.approx((0.05 * 1.0 + 0.55 * 2.0) / 0.6)
