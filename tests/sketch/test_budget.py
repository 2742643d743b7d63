"""The choice of counters within a memory budget."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch import budget


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
        choices = budget.choose(tables, memory, max_hot, logarithmic=logarithmic)
    except SketchError:
        smallest = [[budget._dense(t, max_hot), budget._count_min(t, 8, max_hot)] for t in tables]
        if logarithmic:
            smallest = [[*some, budget._logarithmic(t, 3, max_hot)] for some, t in zip(smallest, tables, strict=True)]
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
        assert choice.kind != "count_min" or choice.log2_width == 8 or choice.bytes <= budget._dense(table, 1).bytes
    # No table has a counter for every row while a smaller one that would take less has none.
    bits = [choice.counter_bits or 32 * (choice.kind == "dense") for choice in choices]
    without = [table.rows for table, size in zip(tables, bits, strict=True) if not size]
    logs = [table.rows for table, choice in zip(tables, choices, strict=True) if choice.counter_bits]
    assert not without or not logs or max(logs) <= min(without)


def test_a_billion_rows_fit_the_default_budget():
    (choice,) = budget.choose([TableSpec("huge", 10**9, 4)], 512 * 2**20, 10**6)
    assert (choice.kind, choice.counter_bits) == ("logarithmic", 4)
    assert 500_000_001 < choice.bytes <= 512 * 2**20
    (choice,) = budget.choose([TableSpec("huge", 10**9, 4)], 350_000_000, 10**6)
    assert choice.kind == "count_min"
    assert choice.log2_width >= 23
    assert choice.hot_rows == 10**6
