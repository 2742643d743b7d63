"""The sketches of all tables together: counts and profiles, and the choice of counters within a memory budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch import sketch_set
from flexd.sketch.sketch_set import AccessCounts, SketchSet
from flexd.sketch.table_sketch import SketchSettings

SMALL, LARGE = TableSpec("small", 300, 4), TableSpec("large", 400_000, 4)
TABLES = [SMALL, LARGE]
T0 = 1.7e9


def sketches_of(half_life: float | None = 50.0) -> SketchSet:
    sketches = SketchSet(TABLES, SketchSettings(1_000_000, half_life, 1e9, 500, logarithmic=False))
    assert [choice.kind for choice in sketches.choices()] == ["dense", "count_min"]
    return sketches


@pytest.mark.parametrize("half_life", [None, 50.0])
def test_a_profile_has_what_was_given_and_is_as_of_the_newest_event_or_later(half_life):
    sketches = sketches_of(half_life)
    for table in TABLES:
        sketches.ingest(table.name, np.arange(100), 0, T0)
    assert sketches.ingest("other", np.arange(6), 0, T0 + 1e6) == AccessCounts(unknown_table=6), "the clock stays"
    profile = sketches.profile({"small": 11.0}, generation=7, lag_messages=3)
    assert (profile.generation, profile.lag_messages, profile.samples) == (7, 3, 200)
    assert profile.event_time_seconds == T0
    assert [table.accesses_per_step for table in profile.tables] == [11.0, 0.0]
    assert [table.accesses_per_step for table in sketches.profile(8.0).tables] == pytest.approx([4.0, 4.0])
    idle = sketches.profile(idle_seconds=10.0)
    assert idle.event_time_seconds == T0 + 10.0
    factor = 1.0 if half_life is None else 2.0 ** (-10.0 / half_life)
    assert [table.weight for table in idle.tables] == pytest.approx([100 * factor] * 2, rel=1e-3)
    assert sketches.query("small", np.zeros(1, np.int64), 10.0) == pytest.approx(factor, rel=1e-3)
    assert sketches.profile(idle_seconds=-1.0).event_time_seconds == T0


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 10**9), min_size=1, max_size=30),
    st.integers(2**16, 2**32),
    st.sampled_from([1, 1000, 10**6]),
    st.booleans(),
)
def test_budget_is_kept_and_small_tables_are_exact_first(rows, memory, max_hot, logarithmic):
    tables = [TableSpec(f"t{i}", n, 4) for i, n in enumerate(rows)]
    try:
        choices = sketch_set.choose(tables, memory, max_hot, logarithmic=logarithmic)
    except SketchError:
        smallest = [[sketch_set._dense(t, max_hot), sketch_set._count_min(t, 8, max_hot)] for t in tables]
        if logarithmic:
            smallest = [
                [*some, sketch_set._logarithmic(t, 3, max_hot)] for some, t in zip(smallest, tables, strict=True)
            ]
        assert sum(min(choice.bytes for choice in some) for some in smallest) > memory
        return
    assert sum(choice.bytes for choice in choices) <= memory
    dense = [table.rows for table, choice in zip(tables, choices, strict=True) if choice.kind == "dense"]
    sketched = [table.rows for table, choice in zip(tables, choices, strict=True) if choice.kind != "dense"]
    assert not dense or not sketched or max(dense) <= min(sketched)
    for table, choice in zip(tables, choices, strict=True):
        assert (choice.error_share > 0) == (choice.kind == "count_min") == (choice.log2_width > 0)
        assert (choice.relative_error > 0) == (choice.kind == "logarithmic") == (choice.counter_bits > 0)
        assert logarithmic or choice.kind != "logarithmic"
        # A sketch larger than exact counters would be absurd, but for the narrowest one.
        assert choice.kind != "count_min" or choice.log2_width == 8 or choice.bytes <= sketch_set._dense(table, 1).bytes
    # No table has a counter for every row while a smaller one that would take less has none.
    bits = [choice.counter_bits or 32 * (choice.kind == "dense") for choice in choices]
    without = [table.rows for table, size in zip(tables, bits, strict=True) if not size]
    logs = [table.rows for table, choice in zip(tables, choices, strict=True) if choice.counter_bits]
    assert not without or not logs or max(logs) <= min(without)


def test_a_billion_rows_fit_the_default_budget():
    (choice,) = sketch_set.choose([TableSpec("huge", 10**9, 4)], 512 * 2**20, 10**6)
    assert (choice.kind, choice.counter_bits) == ("logarithmic", 4)
    assert 500_000_001 < choice.bytes <= 512 * 2**20
    (choice,) = sketch_set.choose([TableSpec("huge", 10**9, 4)], 350_000_000, 10**6)
    assert choice.kind == "count_min"
    assert choice.log2_width >= 23
    assert choice.hot_rows == 10**6
