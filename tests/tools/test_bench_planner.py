"""No check of a plan passes with one that copies nothing, and sharding of pooled tables is no worse than its peers'."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from flexd.core.layout import RankLayout
from tools.bench.cases.planner import checks_of
from tools.bench.planning import made_up_tables
from tools.bench.sections.pooled import compare, over_best


def failed(checks: list[dict[str, Any]]) -> list[str]:
    return [entry["name"] for entry in checks if not entry["ok"]]


def figures() -> dict[str, Any]:
    """Return figures that pass every check."""
    skew = {
        "plan_seconds": 1.0, "gap": 1e-9, "rows": {"NODE": 5, "DEVICE": 5},
        "strategies": [{"strategy": "two_hop", "milliseconds": 2.0}, {"strategy": "flexd", "milliseconds": 1.5}],
    }  # fmt: skip
    return {
        "strategies": [skew, deepcopy(skew)],
        "whole_list": {"plan_seconds": 1.0, "gap": 1e-9, "rows_above_home": 9, "share_of_a_core": 0.005},
        "many_tables": [
            {"tables": 10, "plan_seconds": 0.1, "gap": 1e-9, "rows_above_home": 9},
            {"tables": 20, "plan_seconds": 0.2, "gap": 1e-9, "rows_above_home": 9},
        ],
        "peak_gibibytes": 1.0,
    }


def test_plans_that_copy_rows_pass() -> None:
    assert failed(checks_of(figures())) == []


@pytest.mark.parametrize("of", ["strategies", "whole_list", "many_tables"])
def test_a_plan_that_copies_nothing_fails(of: str) -> None:
    found = figures()
    if of == "strategies":
        found[of][1]["rows"] = {"NODE": 0, "DEVICE": 0}
    else:
        (found[of] if of == "whole_list" else found[of][0])["rows_above_home"] = 0
    assert {"plan seconds, worst", "peak memory of this process, GiB"} <= set(failed(checks_of(found)))


def test_a_plan_slower_than_a_peer_fails() -> None:
    found = figures()
    found["strategies"][1]["strategies"][1]["milliseconds"] = 2.5
    assert failed(checks_of(found)) == ["flexd over the best other strategy, time"]


def test_pooled_tables_are_sharded_no_worse_than_by_any_peer() -> None:
    found = compare([table for table in made_up_tables(30) if table.bags], RankLayout(2, 2), "azure-a100-200g", 300)
    assert {"all, rows", "all, better answer", "size_lookup greedy"} <= found.keys()
    assert found["all, better answer"]["milliseconds"] <= found["all, rows"]["milliseconds"]
    assert sum(found["chosen"].values()) == 30
    assert over_best(found, "flexd") <= 1.0
