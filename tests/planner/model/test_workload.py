"""Loads made from a profile: every access and every row is counted once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import (
    SYNCED,
    GroupLoad,
    make_loads,
    make_table_loads,
)
from flexd.sketch.profile import Profile
from tests.support.planner_cases import cluster, group_cost, profile

KEYSPACE = KeySpace([TableSpec("items", 5000, 16), TableSpec("users", 3000, 32, optimizer="rowwise_adagrad")])
LAYOUT = RankLayout(2, 2)
ACCESSES = 20_000.0


def unlisted_rows(seen: Profile, count: int) -> np.ndarray:
    return np.setdiff1d(np.arange(KEYSPACE.tables[0].rows), seen.tables[0].hot_rows)[:count]


def rows_and_accesses(load: GroupLoad) -> tuple[float, float]:
    """All rows of the load, and all their accesses per rank and step."""
    accesses = float(load.accesses.sum() + load.bin_accesses @ load.bin_rows)
    return len(load.keys) + float(load.bin_rows.sum()), accesses


@pytest.mark.parametrize("with_bins", [True, False], ids=["in bins", "unexplained"])
def test_rows_listed_on_request_leave_the_bins(with_bins: bool) -> None:
    seen = profile(KEYSPACE, ACCESSES, hot=300)
    if not with_bins:
        blind = dataclasses.replace(seen.tables[0], bin_share=np.empty(0), bin_rows=np.empty(0))
        seen = dataclasses.replace(seen, tables=(blind, seen.tables[1]))
    pinned = unlisted_rows(seen, 1000)
    plain = make_loads(seen, KEYSPACE, LAYOUT)[0]
    load = make_loads(seen, KEYSPACE, LAYOUT, also_list=KEYSPACE.keys(0, pinned))[0]
    assert len(load.keys) == 1300
    assert np.isin(KEYSPACE.keys(0, pinned), load.keys).all()
    assert rows_and_accesses(load) == pytest.approx(rows_and_accesses(plain))
    assert rows_and_accesses(load) == pytest.approx((5000, ACCESSES / LAYOUT.world_size))
    assert load.tail_accesses == pytest.approx(plain.tail_accesses)
    added = load.accesses[np.isin(load.keys, KEYSPACE.keys(0, pinned))]
    assert added == pytest.approx(np.full(1000, plain.tail_accesses))
    # At HOME the cost is the same, whether rows are listed one by one or in a bin.
    costs = [group_cost(each, np.zeros(len(each.keys), np.uint8), LAYOUT, cluster()) for each in (plain, load)]
    np.testing.assert_allclose(costs[0].bytes, costs[1].bytes)
    assert costs[0].rows == pytest.approx(costs[1].rows)
    assert costs[0].rows[Tier.HOME] == pytest.approx(5000)


def test_loads_by_table_sum_to_the_loads_by_dim_group() -> None:
    keyspace = KeySpace([TableSpec("a", 500, 16), TableSpec("b", 300, 32), TableSpec("c", 400, 16)])
    seen = profile(keyspace, ACCESSES, hot=50)
    shape = TrainingShape(frozen_tables=frozenset({"c"}), micro_batches=3)
    groups, tables = make_loads(seen, keyspace, LAYOUT, shape), make_table_loads(seen, keyspace, LAYOUT, shape)
    assert [load.group for load in tables] == [0, 1, 0]
    for index, group in enumerate(groups):
        mine = [load for load in tables if load.group == index]
        assert np.array_equal(group.keys, np.sort(np.concatenate([load.keys for load in mine])))
        total = [load.listed_statistics(LAYOUT).sum(axis=1) + load.bin_statistics(LAYOUT) @ load.bin_rows
                 for load in (group, *mine)]  # fmt: skip
        np.testing.assert_allclose(total[0], np.sum(total[1:], axis=0))
    assert tables[2].listed_statistics(LAYOUT)[SYNCED].sum() == 0
    assert tables[0].listed_statistics(LAYOUT)[SYNCED].sum() == 3 * 50, "a bit in each of three passes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accesses_per_step": float("nan")}, "accesses per step are unknown"),
        ({"accesses_per_step": -1.0}, "accesses per step are unknown"),
        ({"table": "other"}, "other tables"),
        ({"hot_share": np.full(50, np.nan)}, "NaN or negative"),
        ({"hot_lower": np.full(50, -1e-9)}, "NaN or negative"),
        ({"hot_upper": np.full(50, np.inf)}, "NaN or negative"),
        ({"hot_rows": np.full(50, 7)}, "listed twice"),
        ({"hot_rows": np.arange(50) + 4990}, "outside the table"),
        ({"hot_rows": np.arange(50) - 1}, "outside the table"),
        ({"bin_share": np.array([-1.0])}, "bin is NaN"),
        ({"bin_rows": np.array([np.nan])}, "bin is NaN"),
    ],
)
def test_damaged_profiles_are_refused(change: dict, message: str) -> None:
    seen = profile(KEYSPACE, ACCESSES, hot=50)
    broken = dataclasses.replace(seen.tables[0], **change)
    with pytest.raises(PlanError, match=message):
        make_loads(dataclasses.replace(seen, tables=(broken, seen.tables[1])), KEYSPACE, LAYOUT)


def test_a_profile_without_accesses_is_refused_and_a_table_without_is_not() -> None:
    seen = profile(KEYSPACE, ACCESSES, hot=50)
    empty = tuple(dataclasses.replace(table, weight=0.0, accesses_per_step=float("nan")) for table in seen.tables)
    with pytest.raises(PlanError, match="empty"):
        make_loads(dataclasses.replace(seen, tables=empty), KEYSPACE, LAYOUT)
    items, users = make_loads(dataclasses.replace(seen, tables=(empty[0], seen.tables[1])), KEYSPACE, LAYOUT)
    assert rows_and_accesses(items) == (0.0, 0.0)
    assert rows_and_accesses(users)[1] == pytest.approx(ACCESSES / LAYOUT.world_size)
