"""Pooled tables: capacity binds, and every strategy keeps it."""

from __future__ import annotations

import pytest
from planner_pooled import ROWS_IN_TWO_MEMORIES, pooled_tables
from planner_problems import made_up_tables


@pytest.fixture(scope="module")
def problems() -> list[dict]:
    return pooled_tables(made_up_tables(pooled=10), "azure-a100-200g", 1.05)


def test_capacity_binds_and_is_kept(problems: list[dict]) -> None:
    fits, binds = problems
    for problem in problems:
        for row in problem["strategies"]:
            if "not_applicable" not in row:
                assert row["stored_gigabytes"] <= problem["fast_gigabytes"] * (1 + 1e-9), row["strategy"]
    assert binds["fast_gigabytes"] < binds["share_gigabytes"] <= fits["fast_gigabytes"]
    fullest = max(row["stored_gigabytes"] for row in binds["strategies"])
    assert fullest > 0.99 * binds["fast_gigabytes"]


def test_rows_that_are_divided_read_less_from_host_memory_than_whole_tables(problems: list[dict]) -> None:
    named = {row["strategy"]: row for row in problems[1]["strategies"]}
    whole = [row for name, row in named.items() if name.startswith("table_wise")]
    assert len(whole) == 3
    for name in ("recshard", ROWS_IN_TWO_MEMORIES):
        assert named[name]["reading_seconds"] < min(row["reading_seconds"] for row in whole)
        assert named[name]["accesses_in_fast_memory"] < 1
