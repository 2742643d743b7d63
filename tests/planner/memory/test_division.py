"""Division of fast memory: within its budget, as good as trying everything, never worse than by rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexd.core.errors import PlanError
from flexd.core.fast_memory import FRAME_BYTES, proportional_frames
from flexd.core.layout import RankLayout
from flexd.planner.memory.division import divide, priced, proportional
from flexd.planner.memory.miss_curve import MissCurve
from flexd.planner.memory.slot_curve import SlotCurve
from flexd.planner.model.row_bytes import Exchange
from tests.support.planner_cases import load, zipf

ALONE = RankLayout(1, 1)
SLOTS = RankLayout(2, 2)


def curve(touches: list[float], *, more_rows: int = 0, frame_bytes: int = 100, passes: int = 1) -> MissCurve:
    """One row each, and some that nothing touches."""
    ordered = np.sort(np.array(touches))[::-1]
    return MissCurve(ordered, np.ones(len(ordered)), len(ordered) + more_rows, frame_bytes, passes)


def test_misses_are_the_touches_beyond_the_frames_and_what_the_update_reads_again() -> None:
    some = curve([0.5, 0.25, 0.25, 0.125])
    assert some.distinct_rows == 1.125
    assert some.misses(0) == pytest.approx(2 * 1.125)
    assert some.misses(1) == pytest.approx(0.625 + 0.125)
    assert some.misses(1.5) == pytest.approx(0.5)
    assert some.misses(3) == pytest.approx(0.125)
    assert some.misses(4) == 0.0
    assert curve([0.5, 0.25, 0.25, 0.125], passes=3).misses(1) == pytest.approx(3 * 0.75)


def test_segments_are_the_curve() -> None:
    some = curve([0.9, 0.9, 0.7, 0.3, 0.2], more_rows=3, passes=2)
    frames, saved = some.segments()
    assert frames.sum() == some.home_rows
    assert (np.diff(saved) <= 0).all()
    for count, misses in zip(np.cumsum(frames), some.misses(0) - np.cumsum(frames * saved), strict=True):
        assert some.misses(count) == pytest.approx(misses, abs=1e-12)


def test_the_curve_of_a_load_has_the_touches_of_any_rank() -> None:
    """Of 8 ranks each has an eighth of every class; bins that claim more rows than there are end at the table."""
    problem = load(zipf(100, 1.1, 4.0), bin_accesses=(0.001,), bin_rows=(5000.0,))
    layout = RankLayout(4, 2)
    some = MissCurve.of(problem, layout, 400)
    anywhere = -np.expm1(-8 * zipf(100, 1.1, 4.0))
    assert some.home_rows == 50
    assert some.frame_bytes == 64 + FRAME_BYTES
    assert some.rows.sum() == pytest.approx(50)
    assert some.misses(0) - some.distinct_rows == pytest.approx(anywhere.sum() / 8 + (50 - 12.5) * -np.expm1(-0.008))
    assert some.misses(2) == pytest.approx(
        some.distinct_rows - np.sort(anywhere)[::-1][:16].sum() / 8 + max(0, some.distinct_rows - 2)
    )


touch_lists = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@example([[1.0, 1.0, 1.0, 1.0, 1.0, 0.375], [1.0, 1.0, 1.0, 0.5, 0.5]], 10)
@given(st.lists(touch_lists, min_size=1, max_size=3), st.integers(0, 20))
def test_small_cases_of_equal_frames_equal_every_division_tried(groups: list[list[float]], frames: int) -> None:
    curves = [curve(touches, more_rows=1) for touches in groups]
    budget = 100 * max(frames, len(groups)) + 50
    found = divide(curves, budget, 1.0)
    best = min(
        sum(each.misses(count) for each, count in zip(curves, counts, strict=True))
        for counts in itertools.product(*(range(1, each.home_rows + 1) for each in curves))
        if 100 * sum(counts) <= budget
    )
    assert found.misses.sum() == pytest.approx(best, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(touch_lists, st.integers(0, 30), st.integers(20, 300), st.floats(0, 2)), min_size=1, max_size=4),
    st.floats(0, 6000),
    st.lists(st.floats(0, 2), max_size=8),
    st.floats(0, 1),
)
def test_never_over_the_budget_and_never_worse_than_by_rows(
    groups: list[tuple[list[float], int, int, float]], budget: float, gains: list[float], latency: float
) -> None:
    curves = [curve(touches, more_rows=more, frame_bytes=size) for touches, more, size, _ in groups]
    prices = [price for *_, price in groups]
    each = SlotCurve.of(np.array([np.zeros(len(gains)), gains, np.array(gains) * 1.5]), SLOTS, Exchange.CHAIN, 30)
    slots = [each] * len(groups) if gains else []
    found = divide(curves, budget, prices, slots, replica_latency_seconds=latency)
    assert found.used_bytes <= max(budget, sum(one.frame_bytes for one in curves))
    assert all(1 <= count <= one.home_rows for count, one in zip(found.frames.tolist(), curves, strict=True))
    by_rows = proportional(curves, budget, prices)
    if by_rows.used_bytes <= budget:
        assert found.seconds <= by_rows.seconds + 1e-9
    again = priced(found.frames, found.slots, curves, slots, np.array(prices), replica_latency_seconds=latency)
    assert again.seconds == pytest.approx(found.seconds)


def test_one_more_byte_is_worth_the_same_in_frames_and_replica_slots() -> None:
    """What is taken saves at least the multiplier a byte, what is left at most."""
    curves = [curve([1 / (i + 1) for i in range(300)], frame_bytes=100), curve([0.5] * 200, frame_bytes=400)]
    gains = np.array([np.zeros(400), 4e-3 / np.arange(1, 401), 5e-3 / np.arange(1, 401)])
    slots = [SlotCurve.of(gains, SLOTS, Exchange.CHAIN, 190), SlotCurve.of(0 * gains, SLOTS, Exchange.CHAIN, 190)]
    found = divide(curves, 40_000, 1e-3, slots)
    price = found.seconds_per_byte
    assert price > 0
    assert 39_500 < found.used_bytes <= 40_000
    assert found.slots[0] > 5
    assert found.slots[1] == 0
    for one, count in zip(curves, found.frames.tolist(), strict=True):
        assert (one.misses(count - 5) - one.misses(count - 4)) * 1e-3 / one.frame_bytes >= price * (1 - 1e-9)
        assert (one.misses(count + 1) - one.misses(count + 2)) * 1e-3 / one.frame_bytes <= price * (1 + 1e-9)
    count = int(found.slots[0])
    assert slots[0].saved_seconds(count) - slots[0].saved_seconds(count - 1) >= price * 200 * (1 - 1e-9)
    assert slots[0].saved_seconds(count + 2) - slots[0].saved_seconds(count + 1) <= price * 200 * (1 + 1e-9)


def test_slots_that_do_not_pay_for_their_synchronisation_leave_their_bytes_to_frames() -> None:
    curves = [curve([0.9] * 50)]
    slots = [SlotCurve.of(np.full((3, 40), 1e-4), SLOTS, Exchange.CHAIN, 90)]
    with_slots = divide(curves, 3000, 1e-5, slots)
    without = divide(curves, 3000, 1e-5, slots, replica_latency_seconds=1e-2)
    assert with_slots.slots[0] > 0
    assert without.slots[0] == 0
    assert without.frames[0] == 30 > with_slots.frames[0]


def test_the_best_tier_a_slot_comes_first_and_device_only_beyond_its_own_slots() -> None:
    """NODE takes 1/4 slot a rank of 2 x 2, DEVICE 3/4: the second row is not bent, so it rises to DEVICE at once."""
    gains = np.array([[0.0, 0.0, 0.0], [3.0, 1.0, -1.0], [4.0, 6.0, -2.0]])
    found = SlotCurve.of(gains, SLOTS, Exchange.CHAIN, 10)
    np.testing.assert_allclose(found.slots, [0.25, 0.75, 0.5])
    np.testing.assert_allclose(found.seconds, [3.0, 6.0, 1.0])
    assert found.saved_seconds(1.0) == pytest.approx(9.0)
    assert found.saved_seconds(99) == pytest.approx(10.0)


def test_memory_that_saves_nothing_goes_to_rows_without_a_frame() -> None:
    curves = [curve([0.5], more_rows=99), curve([0.5], more_rows=299)]
    found = divide(curves, 20_000, 1.0)
    np.testing.assert_array_equal(found.frames, [50, 149])
    assert found.misses.sum() == 0
    assert found.seconds_per_byte == 0


def test_by_rows_has_a_frame_everywhere() -> None:
    assert proportional_frames(1000, [100, 1], [100, 100]) == [9, 1]
    assert proportional_frames(10**9, [100, 1], [100, 100]) == [100, 1]


@pytest.mark.parametrize(("budget", "price"), [(-1.0, 1.0), (float("nan"), 1.0), (1.0, -1.0), (1.0, float("inf"))])
def test_numbers_that_mean_nothing_are_refused(budget: float, price: float) -> None:
    with pytest.raises(PlanError, match="give numbers of at least 0"):
        divide([curve([0.5])], budget, price)


def test_one_curve_of_slots_for_each_dim_group() -> None:
    some = SlotCurve(np.ones(1), np.ones(1), 10)
    with pytest.raises(PlanError, match="2 curves of slots for 1 dim-groups"):
        divide([curve([0.5])], 1000, 1.0, [some, some])
