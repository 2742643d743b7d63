"""Curves of misses by touches: what frames do not hold, and what an update reads again."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.fast_memory import FRAME_BYTES
from flexd.core.layout import RankLayout
from flexd.planner.memory.miss_curve import MissCurve
from tests.support.planner_cases import load, zipf


def curve(touches: list[float], *, more_rows: int = 0, passes: int = 1) -> MissCurve:
    """One row each, and some that nothing touches."""
    ordered = np.sort(np.array(touches))[::-1]
    return MissCurve(ordered, np.ones(len(ordered)), len(ordered) + more_rows, 100, passes)


def test_misses_are_the_touches_beyond_the_frames_and_what_the_update_reads_again() -> None:
    some = curve([0.5, 0.25, 0.25, 0.125])
    assert some.distinct_rows == 1.125
    by_frames = some.frame_curve()
    assert by_frames.misses(0) == pytest.approx(2 * 1.125)
    assert by_frames.misses(1) == pytest.approx(0.625 + 0.125)
    assert by_frames.misses(1.5) == pytest.approx(0.5)
    assert by_frames.misses(3) == pytest.approx(0.125)
    assert by_frames.misses(4) == 0.0
    assert curve([0.5, 0.25, 0.25, 0.125], passes=3).frame_curve().misses(1) == pytest.approx(3 * 0.75)


def test_segments_descend_and_have_a_frame_for_each_row() -> None:
    some = curve([0.9, 0.9, 0.7, 0.3, 0.2], more_rows=3, passes=2).frame_curve()
    assert some.frames.sum() == some.home_rows
    assert (np.diff(some.saved) <= 0).all()


def test_the_curve_of_a_load_has_the_touches_of_any_rank() -> None:
    """Of 8 ranks each has an eighth of every class; bins that claim more rows than there are end at the table."""
    problem = load(zipf(100, 1.1, 4.0), bin_accesses=(0.001,), bin_rows=(5000.0,))
    some = MissCurve.of(problem, RankLayout(4, 2), 400)
    anywhere = -np.expm1(-8 * zipf(100, 1.1, 4.0))
    assert some.home_rows == 50
    assert some.frame_bytes == 64 + FRAME_BYTES
    assert some.rows.sum() == pytest.approx(50)
    assert some.distinct_rows == pytest.approx(anywhere.sum() / 8 + (50 - 12.5) * -np.expm1(-0.008))
    assert some.frame_curve().misses(2) == pytest.approx(
        some.distinct_rows - np.sort(anywhere)[::-1][:16].sum() / 8 + max(0, some.distinct_rows - 2)
    )
