"""Fast memory of tables: their parts add up to the frames and misses of their dim-group."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.planner.memory.miss_curve import MissCurve
from flexd.planner.memory.residency import HeldRows

touch_lists = st.lists(st.sampled_from([0.001, 0.01, 0.02, 0.1, 0.25, 0.5, 0.9]), max_size=8)


def curve(touches: list[float], *, more_rows: int = 0, passes: int = 1) -> MissCurve:
    ordered = np.sort(np.array(touches, dtype=float))[::-1]
    return MissCurve(ordered, np.ones(len(ordered)), len(ordered) + more_rows, 100, passes)


@settings(max_examples=300, deadline=None)
@given(touch_lists, touch_lists, st.integers(0, 3), st.integers(1, 20), st.integers(1, 3))
def test_the_parts_of_tables_are_the_frames_and_misses_of_the_dim_group(
    some: list[float], others: list[float], more: int, frames: int, passes: int
) -> None:
    group = curve(some + others, more_rows=more, passes=passes)
    shown = [HeldRows.of(frames, group, curve(own, passes=passes), 0.5) for own in (some, others)]
    assert sum(each.misses for each in shown) == pytest.approx(group.misses(frames), abs=1e-9)
    used = sum(touch > 0 for touch in some + others)
    assert sum(each.held_rows for each in shown) == pytest.approx(min(frames, used))
    assert shown[0].next_frame_misses == pytest.approx(group.misses(frames) - group.misses(frames + 1))
    assert shown[0].next_frame_seconds == pytest.approx(0.5 * shown[0].next_frame_misses)


def test_a_row_is_held_if_it_is_used_more_than_the_last_that_fits() -> None:
    group = curve([0.9, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125], more_rows=3)
    shown = HeldRows.of(3, group, curve([0.5, 0.25, 0.125]), 2e-5)
    assert shown.least_touches == 0.25
    np.testing.assert_allclose(shown.held(np.array([0.9, 0.26, 0.25, 0.24])), [1, 1, 0.25, 0])
    assert shown.held_rows == pytest.approx(1.25)
    assert shown.misses == pytest.approx(0.75 * 0.25 + 0.125)
    assert shown.next_frame_misses == pytest.approx(0.25)
    assert shown.next_frame_seconds == pytest.approx(5e-6)


def test_with_a_frame_for_every_row_that_is_used_none_is_missed() -> None:
    group = curve([0.5, 0.25], more_rows=3)
    for frames in (2, 4, 5):
        shown = HeldRows.of(frames, group, curve([0.25]), math.nan)
        assert shown.misses == 0
        assert shown.held_rows == 1
        assert shown.least_touches == 0
        assert math.isnan(shown.next_frame_seconds)
        np.testing.assert_array_equal(shown.held(np.array([0.25])), 1.0)
