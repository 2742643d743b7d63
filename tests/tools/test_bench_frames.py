"""Frames beside an independent simulator: what is counted, and which checks there are."""

from __future__ import annotations

import numpy as np
import pytest
from bench_frames import Steps, checks_of, missed_by_frames, missed_by_static

KEYS = np.array([7, 7, 9, 5, 5, 9, 7, 8, 9, 9, 5, 7] * 20)


def test_a_step_uses_each_distinct_row_once_and_knows_its_next_use() -> None:
    steps = Steps.of(KEYS[:12], 3)
    assert steps.rows.tolist() == [1, 3, 0, 3, 1, 2, 3, 0, 1, 3]
    assert steps.starts.tolist() == [0, 2, 4, 7, 10]
    assert steps.next_step.tolist() == [2, 1, 3, 2, 3, 5, 3, 5, 5, 5]
    assert (len(steps), steps.distinct, steps.first_counted) == (4, 4, 1)


@pytest.mark.parametrize(("frames", "half_life", "ahead", "least"), [(4, 20.0, 0, 0.0), (3, 20.0, 100, 0.2)])
def test_misses_are_counted_from_the_first_quarter_on(frames: int, half_life: float, ahead: int, least: float) -> None:
    steps = Steps.of(KEYS, 3)
    misses, seconds = missed_by_frames(steps, frames, half_life, ahead)
    assert misses == pytest.approx(least, abs=0.15)
    assert seconds > 0
    assert missed_by_frames(steps, frames, 0.0, 0)[0] >= misses
    assert 0 <= missed_by_static(steps, 3) < 0.5


def test_checks() -> None:
    ours = {"LRU": 0.5, "Belady": 0.2, "ahead 0": 0.4, "ahead 1": 0.3, "ahead 4": 0.26}
    answer = {
        "name": "t",
        "single": {"LRU": 1.02, "Belady": 1.0},
        "0.05": {"flexd": ours, "libcachesim": {"Belady": 0.2}},
    }
    assert {entry["name"]: entry["ok"] for entry in checks_of([answer])} == {
        "t: LRU beside libcachesim": False, "t: Belady beside libcachesim": True,
        "t, 0.05: ahead 0 / LRU": True, "t, 0.05: ahead 1 / LRU": True, "t, 0.05: ahead 4 / LRU": True,
        "t, 0.05: ahead 4 / Belady": False,
    }  # fmt: skip
