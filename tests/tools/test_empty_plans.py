"""No check of a benchmark passes with a plan that copies nothing."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import bench_drift
import bench_planner
import bench_simulate
import bench_touches
import pytest


def failed(checks: list[dict[str, Any]]) -> list[str]:
    return [entry["name"] for entry in checks if not entry["ok"]]


def planner_figures() -> dict[str, Any]:
    """Figures that pass every check."""
    skew = {
        "plan_seconds": 1.0, "gap": 1e-9, "rows": {"NODE": 5, "DEVICE": 5}, "flexshard_all_to_all_saved": 0.9,
        "flexshard_mean_speedup": 6.0, "flexshard_memory_over_cap": 1.0, "flexd_memory_over_cap": 1.0,
        "flexd_memory_over_flexshard": 0.9,
        "strategies": [{"strategy": "two_hop", "milliseconds": 2.0}, {"strategy": "flexd", "milliseconds": 1.5}],
    }  # fmt: skip
    return {
        "strategies": [skew, deepcopy(skew)],
        "whole_list": {"plan_seconds": 1.0, "gap": 1e-9, "rows_above_home": 9, "share_of_a_core": 0.005},
        "many_tables": [
            {"tables": 10, "plan_seconds": 0.1, "gap": 1e-9, "rows_above_home": 9},
            {"tables": 20, "plan_seconds": 0.2, "gap": 1e-9, "rows_above_home": 9},
        ],
        "pooled_tables": [
            {
                "problem": "a quarter",
                "strategies": [
                    {"strategy": "table_wise", "milliseconds": 2.0, "reading_seconds": 1e-3},
                    {"strategy": "flexd_two_memories", "milliseconds": 2.1, "reading_seconds": 1e-4},
                ],
            }
        ],
        "peak_gibibytes": 1.0,
    }


WITHOUT_PLANS = {
    "FlexShard: all-to-all saved, worst skew",
    "FlexShard: times faster than row-wise (mean over ranks), worst skew",
    "FlexShard: memory over the cap",
    "pooled tables, a quarter: flexd over the best of whole tables, worst skew",
}


def test_no_check_of_the_planner_passes_with_empty_plans() -> None:
    figures = planner_figures()
    assert failed(bench_planner.checks(figures)) == []
    for skew in figures["strategies"]:
        skew["rows"] = {"NODE": 0, "DEVICE": 0}
    for entry in (figures["whole_list"], *figures["many_tables"]):
        entry["rows_above_home"] = 0
    every = bench_planner.checks(figures)
    assert {entry["name"] for entry in every} - set(failed(every)) == WITHOUT_PLANS


def test_one_skew_with_an_empty_plan_is_enough_to_fail() -> None:
    figures = planner_figures()
    figures["strategies"][1]["rows"] = {"NODE": 0, "DEVICE": 0}
    names = failed(bench_planner.checks(figures))
    assert "rows with copies, fewest" in names
    assert "flexd over the best peer, time, worst skew" in names
    assert "gap to the lower bound as a share of the saving, worst" in names


def test_pooled_tables_are_compared_with_the_best_of_whole_tables_by_exchange_and_reading() -> None:
    figures = planner_figures()
    figures["pooled_tables"][0]["strategies"][0]["reading_seconds"] = 1e-4
    assert failed(bench_planner.checks(figures)) == [
        "pooled tables, a quarter: flexd over the best of whole tables, worst skew"
    ]


def test_a_plan_as_slow_as_the_best_peer_is_not_ahead() -> None:
    figures = planner_figures()
    figures["strategies"][0]["strategies"][1]["milliseconds"] = 2.0
    assert failed(bench_planner.checks(figures)) == ["flexd over the best peer, time, worst skew"]


@pytest.mark.parametrize("saved", [1e-6, 0.0])
def test_no_check_of_re_planning_passes_where_it_saves_nothing(saved: float) -> None:
    summary = {
        "strategies": {"replanned": {"saved": {"exposed_seconds": saved}}},
        "drift": {
            "traffic_over_oracle": 1.0, "exposed_over_oracle": 1.0, "exposed_saved_over_static": 2.0,
            "critical_bytes_saved_over_static": 2.0,
        },
        "least_over_bound": 1.1,
    }  # fmt: skip
    every = bench_simulate.checks("trace", summary)
    assert len(failed(every)) == (0 if saved else len(every))


@pytest.mark.parametrize("copies", [20.0, 0.0])
def test_no_check_of_drift_passes_with_an_empty_plan(copies: float) -> None:
    regret = {"steady": 1.0, "replaced": 1.2, "flatter": 1.001}
    found = {name: {"rows_with_copies": copies, "regret": value} for name, value in regret.items()}
    every = bench_drift.checks_of(found, 1.01)
    assert len(failed(every)) == (0 if copies else 3)


def test_no_check_of_touches_passes_with_an_empty_plan() -> None:
    ratios = {"measured": {"intra": 1.0, "inter": 1.0}, "same_steps": {"intra": 1.0, "inter": 1.0}}
    figures = {
        f"shop sequences {number}": {"node_rows": 3, "device_rows": 4, "predicted_over_measured": ratios}
        for number in range(2)
    }
    assert failed(bench_touches.checks_of(figures, 2)) == []
    figures["shop sequences 1"] |= {"node_rows": 0, "device_rows": 0}
    names = failed(bench_touches.checks_of(figures, 2))
    assert "shop sequences 0: same steps, inter-node" not in names
    assert len(names) == 5
