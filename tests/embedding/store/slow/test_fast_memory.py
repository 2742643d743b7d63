"""Division of fast memory: within its budget, as good as trying everything, never worse than by rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding.store.slow.fast_memory import (
    CacheSlotCurve,
    divide_cache_slots,
    proportional_cache_slots,
    total_misses,
)

saved_lists = st.lists(st.floats(0.001, 2.0), min_size=1, max_size=6)


def curve(saved: list[float], *, more_rows: int = 0, cache_slot_bytes: int = 100, cold: float = 0.0) -> CacheSlotCurve:
    """One cache slot each, and some that save nothing."""
    ordered = np.sort(np.array(saved))[::-1]
    return CacheSlotCurve(np.ones(len(ordered)), ordered, len(ordered) + more_rows, cache_slot_bytes, cold)


def test_misses_are_what_the_cache_slots_do_not_save() -> None:
    some = CacheSlotCurve(np.array([2.0, 4.0]), np.array([1.5, 0.25]), 8, 100, cold=0.5)
    assert some.misses(0) == pytest.approx(4.5)
    assert some.misses(1.5) == pytest.approx(2.25)
    assert some.misses(4) == pytest.approx(1.0)
    assert some.misses(7) == 0.5
    assert some.misses(8) == 0.0, "every row has a cache slot"


@settings(max_examples=150, deadline=None)
@given(st.lists(saved_lists, min_size=1, max_size=3), st.integers(0, 20))
def test_small_cases_of_equal_cache_slots_equal_every_division_tried(
    groups: list[list[float]], cache_slots: int
) -> None:
    curves = [curve(saved, more_rows=1) for saved in groups]
    budget = 100 * max(cache_slots, len(groups)) + 50
    found = divide_cache_slots(curves, budget)
    best = min(
        total_misses(curves, counts)
        for counts in itertools.product(*(range(1, each.home_rows + 1) for each in curves))
        if 100 * sum(counts) <= budget
    )
    assert total_misses(curves, found) == pytest.approx(best, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(saved_lists, st.integers(0, 30), st.integers(20, 300)), min_size=1, max_size=4),
    st.floats(0, 6000),
)
def test_never_over_the_budget_and_never_worse_than_by_rows(
    groups: list[tuple[list[float], int, int]], budget: float
) -> None:
    curves = [curve(saved, more_rows=more, cache_slot_bytes=size) for saved, more, size in groups]
    sizes = [one.cache_slot_bytes for one in curves]
    found = divide_cache_slots(curves, budget)
    assert np.dot(found, sizes) <= max(budget, sum(sizes))
    assert all(1 <= count <= one.home_rows for count, one in zip(found, curves, strict=True))
    by_rows = proportional_cache_slots(budget, [one.home_rows for one in curves], sizes)
    if np.dot(by_rows, sizes) <= budget:
        assert total_misses(curves, found) <= total_misses(curves, by_rows) + 1e-9


def test_memory_that_saves_nothing_goes_to_rows_without_a_cache_slot() -> None:
    curves = [curve([0.5], more_rows=99), curve([0.5], more_rows=299)]
    assert divide_cache_slots(curves, 20_000) == [50, 149]
