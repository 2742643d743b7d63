"""``bench_kernel_costs``: its comparisons on kernels of a known law, and AutoShard's cost model."""

from __future__ import annotations

from itertools import islice

import bench_kernel_costs
import numpy as np
import pytest
from autoshard_costs import AutoShardCosts
from planner_problems import made_up_tables

from flexd.planner.tables.kernel_costs import work_of
from flexd.topology.kernel_design import designed_sets
from flexd.topology.kernel_file import KernelMeasurements, TableSet

SETS = list(islice(designed_sets(bench_kernel_costs.LIMITS), 60))


def law(sets: list[TableSet]) -> np.ndarray:
    """float64[n, 2]: 20 us a step, 5 us a table, and one or two ns for each number read."""
    nothing = np.ones(len(sets))
    work = work_of(KernelMeasurements("", "", "", tuple(sets), nothing, nothing, nothing))
    return 2e-5 + 5e-6 * work[:, :1] + work[:, 8:9] * np.array([1e-9, 2e-9])


@pytest.fixture(scope="module")
def models():
    return bench_kernel_costs.fitted(SETS[:48], law(SETS[:48]), epochs=40)[0]


def test_every_model_is_compared_on_sets_that_it_did_not_see(models) -> None:
    errors = bench_kernel_costs.errors_of(models, SETS[48:], law(SETS[48:]))
    assert set(errors) == {"analytic", "physical", "boosted", "autoshard", "flexd"}
    for kind in ("lookup_single", "lookup_several", "update_single", "update_several"):
        assert errors["flexd"][kind]["median"] < 0.05
        assert errors["flexd"][kind]["median"] <= errors["analytic"][kind]["median"]
        assert errors["flexd"][kind]["median"] < errors["autoshard"][kind]["median"]


def test_plans_are_measured_rank_by_rank(models, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(kernels, sets, seed):
        sets = list(sets)
        return sets, law(sets)

    monkeypatch.setattr(bench_kernel_costs, "measured", measured)
    pooled = [table for table in made_up_tables(40) if table.bags > 0]
    found = bench_kernel_costs.compare_plans(None, models, pooled, (12, 3, 8))
    assert found["rank_correlation"]["flexd"] > 0.9
    assert found["own_plan_seconds"]["flexd"] <= found["random_plan_seconds"]
    figures = {
        "held_out": {name: {"lookup_single": {"median": 0.05, "high": 0.2}} for name in models},
        "unseen_tables": {name: {"lookup_single": {"median": 0.05, "high": 0.2}} for name in models},
        "plans": found,
    }
    assert all(entry["ok"] for entry in bench_kernel_costs.checks(figures)[:7])
    figures["unseen_tables"]["flexd"] = {"lookup_single": {"median": 0.11, "high": 0.26}}
    assert [entry["ok"] for entry in bench_kernel_costs.checks(figures)[3:6]] == [False, False, False]
    found["rank_correlation"]["flexd"] = 0.8
    assert not bench_kernel_costs.checks(figures)[6]["ok"]


def test_plans_are_compared_by_medians_of_rounds(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of five is disturbed beyond recognition."""
    seeds: list[int] = []

    def measured(kernels, sets, seed):
        sets = list(sets)
        seeds.append(seed)
        disturbed = np.random.default_rng(seed).permutation(len(sets)) if seed == 5 else np.arange(len(sets))
        return sets, law(sets)[disturbed] * (100.0 if seed == 5 else 1.0)

    monkeypatch.setattr(bench_kernel_costs, "measured", measured)
    pooled = [table for table in made_up_tables(40) if table.bags > 0]
    found = bench_kernel_costs.compare_plans(None, {"flexd": models["flexd"]}, pooled, (12, 3, 8))
    assert found["rank_correlation"]["flexd"] > 0.9
    assert seeds[-5:] == [4, 5, 6, 7, 8], "other ids in every round"
    again = found["rounds_correlation"]
    assert len(again) == bench_kernel_costs.ROUNDS
    assert min(again) == again[1] < 0.9 < again[0]
    assert [
        entry["value"]
        for entry in bench_kernel_costs.checks({"plans": found | {"own_plan_seconds": {"flexd": 1.0, "analytic": 2.0}}})
    ][1] == 0.5


def test_a_plan_by_a_model_balances_what_it_predicts(models) -> None:
    tables = bench_kernel_costs.sized(made_up_tables(24)[2:], np.random.default_rng(0))
    place = bench_kernel_costs.greedy_plan(tables, law, 3, np.zeros(len(tables)))
    seconds = law(bench_kernel_costs.rank_sets(tables, place, 3)).sum(axis=1)
    largest = max(float(law([bench_kernel_costs.set_of([table])]).sum()) for table in tables)
    assert seconds.max() <= max(largest, 1.1 * seconds.mean())
    assert seconds.max() < 0.6 * seconds.sum()


def test_autoshards_model_learns_sums_over_tables() -> None:
    seconds = law(SETS)
    model = AutoShardCosts(SETS[:48], seconds[:48], epochs=150)
    error = np.abs(np.log(model.seconds(SETS[:48]) / seconds[:48]))
    logs = np.log(seconds[:48])
    assert np.median(error) < 0.4 * np.median(np.abs(logs - np.median(logs, axis=0)))
    order = [0, 2, 1]
    three = next(one for one in SETS if len(one.rows) >= 3)
    columns = [getattr(three, name)[:3] for name in ("rows", "dim", "ids", "bags", "skew", "distinct")]
    turned = TableSet(three.dtype, *(column[order] for column in columns))
    np.testing.assert_allclose(
        model.seconds([turned]), model.seconds([TableSet(three.dtype, *columns)]), rtol=1e-4
    )  # fmt: skip
