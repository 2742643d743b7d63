"""``bench_autoshard`` on a small list: its strategies, their prices, its checks."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import autoshard_policy
import bench_autoshard
import numpy as np
import pytest
from autoshard_tasks import TablePool, analytic_costs, split_tables
from planner_problems import made_up_tables

from flexd.core.layout import RankLayout
from flexd.planner.tables.kernel_costs import KernelCosts, work_of
from flexd.planner.tables.kernel_work import DIMS_TERM, IDS, TABLES
from flexd.planner.tables.options import Answer
from flexd.topology.kernel_design import KernelRange, designed_sets
from flexd.topology.kernel_file import KernelMeasurements

TRAIN, HELD_OUT = split_tables(made_up_tables(48), 40e9, np.random.default_rng(0))


def learned_costs() -> KernelCosts:
    """Costs learned of kernels that take 20 us a step, 5 us a table and a time for each number read."""
    sets = tuple(islice(designed_sets(KernelRange()), 60))
    nothing = np.zeros(len(sets))
    work = work_of(KernelMeasurements("", "", "", sets, nothing, nothing, nothing))
    seconds = 2e-5 + 5e-6 * work[:, 0] + 1e-9 * work[:, 8]
    return KernelCosts.learned(KernelMeasurements("", "", "", sets, seconds, nothing, 2 * seconds))


def pool_of(tables, memory: float = 40e9, costs: KernelCosts | None = None) -> TablePool:
    return TablePool(tuple(tables), RankLayout(2, 2), costs or analytic_costs(), memory)


@pytest.fixture(scope="module", params=[False, True], ids=["analytic", "learned"])
def compared(request):
    costs = learned_costs() if request.param else analytic_costs()
    policy, training = bench_autoshard.trained_policy(TRAIN, costs, 10, (4, 8))
    case = bench_autoshard.Case(pool_of(HELD_OUT, costs=costs), learned=request.param, evaluations=300)
    found, places = bench_autoshard.compare("small", case, policy, torchrec=False)
    return case, found, places, training


def test_tables_of_the_tasks_are_not_those_that_the_policy_is_trained_on() -> None:
    assert not {table.name for table in TRAIN} & {table.name for table in HELD_OUT}
    assert len(TRAIN) == len(HELD_OUT) == 24


def test_every_strategy_is_a_row(compared) -> None:
    _, found, places, training = compared
    named = {row["strategy"]: row for row in found["strategies"]}
    greedy = {f"{name} greedy" for name in ("size", "dim", "lookup", "size_lookup", "predicted cost")}
    assert greedy | {"random (median)", "AutoShard's policy", "RecShard", "flexd"} <= named.keys()
    assert all(0 <= row["balance"] <= 1 for row in named.values())
    assert named["flexd"]["step_milliseconds"] <= 1.05 * min(row["step_milliseconds"] for row in named.values())
    assert (
        named[bench_autoshard.BEST_OF]["busiest_milliseconds"] <= named[bench_autoshard.POLICY]["busiest_milliseconds"]
    )
    best = named["predicted cost greedy"]["busiest_milliseconds"]
    assert named[bench_autoshard.BY_KERNELS]["busiest_milliseconds"] <= 1.1 * best
    assert all(len(rank) == 24 and rank.max() < 4 for rank in places.values())
    assert training["train_seconds"] > 0
    least = min(named[name]["busiest_milliseconds"] for name in places)
    assert 0.4 * least < found["whole_bound_milliseconds"] <= least * 1.0001


def test_the_policy_is_trained_on_the_costs_that_plans_are_compared_by(compared) -> None:
    case, found, places, _ = compared
    task = case.pool.task(np.arange(24))
    for row in found["strategies"]:
        if row["strategy"] in places:
            seconds = task.device_seconds(places[row["strategy"]][None])[0]
            assert row["busiest_milliseconds"] == pytest.approx(seconds.max() * 1e3)
            assert row["balance"] == pytest.approx(seconds.min() / seconds.max())


def test_learned_costs_are_not_used_for_rows_as_answers(compared) -> None:
    case, _, _, _ = compared
    assert any(option.answer is Answer.ROWS for option in case.options) == (not case.learned)


def test_the_work_of_a_device_is_that_of_its_set_of_tables() -> None:
    class Work:
        def seconds(self, work: np.ndarray) -> np.ndarray:
            return np.stack([work[:, DIMS_TERM], 100 * work[:, TABLES] + work[:, IDS]], axis=1)

    pool = pool_of(HELD_OUT, costs=Work())
    chosen, place = np.arange(5, 17), np.tile([1, 3, 1, 3], 3)
    work = pool.held.chosen(chosen).work(place, 4)
    assert (work[[1, 3], DIMS_TERM] < 6).all()
    found = pool.task(chosen).device_seconds(np.stack([place, place[::-1]]))[0]
    assert found == pytest.approx(Work().seconds(work).sum(axis=1), rel=1e-12)
    assert found[0] == 0 < found[1]


def test_tables_without_look_ups_are_trained_on() -> None:
    idle = [replace(table, lookups=0.0) for table in TRAIN[:3]]
    task = pool_of([*idle, *TRAIN[3:6]]).task(np.arange(6))
    assert (task.cost[:3] == 0).all()
    assert np.isfinite(task.features).all()
    policy, _ = bench_autoshard.trained_policy([*idle, *TRAIN[3:]], analytic_costs(), 2, (8, 8))
    assert all(bool(weights.isfinite().all()) for weights in policy.parameters())


def test_a_strategy_without_room_is_not_applicable() -> None:
    one = HELD_OUT[0]
    tables = [replace(one, name=f"t{number}") for number in range(9)]
    pool = pool_of(tables, memory=2.5 * one.rows * (2.0 * one.dim + 4))
    plans = bench_autoshard.whole_plans(bench_autoshard.Case(pool, learned=False), autoshard_policy.AutoShardPolicy(6))
    assert plans["size greedy"]() is None
    assert plans["AutoShard's policy"]() is None


def test_measured_ranks_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_autoshard, "measured",
        lambda kernels, sets, seed: (sets, np.array([[len(one.rows), one.ids.sum()] for one in sets])),
    )  # fmt: skip
    pool = pool_of(bench_autoshard.scaled(HELD_OUT[:6], 4))
    place = np.array([3, 0, 3, 3, 1, 3])
    ids = np.array([round(table.lookups * table.batch * 4) for table in pool.tables])
    busiest = 4 + ids[place == 3].sum()
    assert busiest > 1 + max(ids[1], ids[4])
    assert bench_autoshard.measure(pool, {"plan": place})["plan"] == pytest.approx(busiest * 1e3)


def test_misses_are_reported(compared) -> None:
    _, found, _, _ = compared

    def checked(changes: dict[str, dict[str, float]]) -> list[bool]:
        rows = [row | changes.get(row["strategy"], {}) for row in found["strategies"]]
        return [entry["ok"] for entry in bench_autoshard.checks({"cases": [found | {"strategies": rows}]})]

    best = {
        bench_autoshard.POLICY: {"busiest_milliseconds": 1e-6}, bench_autoshard.BY_KERNELS: {"busiest_milliseconds": 0},
    }  # fmt: skip
    assert checked(best) == [True, True, True]
    worst = {"busiest_milliseconds": 1e9, "step_milliseconds": 1e9}
    assert not checked({bench_autoshard.POLICY: worst})[0]
    assert not checked({bench_autoshard.BY_KERNELS: worst})[1]
    assert not checked({bench_autoshard.ALL_RULES: worst})[2]


def test_torchrecs_planner_is_priced_where_its_shardings_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench_autoshard.Case(pool_of(HELD_OUT[:3]), learned=False)
    monkeypatch.setattr(
        bench_autoshard.torchrec_planner, "planned",
        lambda tables, layout, memory: ([replace(one, sharding=kind, ranks=(1,)) for one in tables], 2.5),
    )  # fmt: skip
    kind = "table_wise"
    row = bench_autoshard.torchrec_row(case)
    on_one = case.row("", case.whole(np.full(3, 1)), 2.5)
    assert row["busiest_milliseconds"] == pytest.approx(on_one["busiest_milliseconds"])
    assert row["plan_seconds"] == 2.5
    assert "step_milliseconds" not in row
    kind = "grid_shard"
    assert "sharding 'grid_shard'" in bench_autoshard.torchrec_row(case)["not_applicable"]
