"""Misses predicted and measured: what is counted in which half, and which checks there are."""

from __future__ import annotations

import numpy as np
from bench_fast_memory import Halves, checks_of, missed

from flexd.stream.trace import Trace


def trace() -> Trace:
    """Four batches of four: tables a and c are one dim-group, b is the other."""
    table = np.array([0, 1, 0, 0] * 2 + [2, 2, 1, 1] * 2)
    row = np.array([5, 5, 5, 6] * 2 + [1, 2, 3, 3] * 2)
    return Trace(table, row, np.arange(16.0), None, np.array([10, 10, 10]), ("a", "b", "c"))


def test_a_step_uses_each_distinct_row_of_a_dim_group_once() -> None:
    halves = Halves(trace(), 4)
    assert (halves.steps, halves.distinct) == (4, [4, 2])
    assert [rows.tolist() for rows in halves.rows[0]] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rows.tolist() for rows in halves.rows[1]] == [[1], [1], [0], [0]]
    first, second = halves.curves(range(1, 3))
    assert first.touches.tolist() == [0.5]
    assert first.rows.tolist() == [4.0]
    assert (first.home_rows, second.home_rows) == (4, 2)
    assert halves.curves(range(2))[1].touches.tolist() == [1.0]


def test_misses_are_counted_in_the_second_half_after_the_first_was_seen() -> None:
    halves = Halves(trace(), 4)
    assert halves.measured([4, 2]) == [2 / 2, 1 / 2]
    assert missed(halves.rows[0], 4, 2, 0) == 4 / 4
    assert missed(halves.rows[0], 4, 1, 0) > 4 / 4, "a batch that does not fit is read again for its update"


def test_a_division_that_measures_worse_fails() -> None:
    def answer(plan: float, rows: float, predicted: float) -> list[bool]:
        found = {"by the plan": {"measured": plan, "same_half": predicted}, "by rows": {"measured": rows}}
        return [check["ok"] for check in checks_of([{"name": "t", "distinct": [1, 1], "0.05": found}])]

    assert answer(1.0, 1.0, 0.9) == [True, True]
    assert answer(1.1, 1.0, 0.9) == [False, True]
    assert answer(1.0, 1.0, 0.4) == [True, False]
