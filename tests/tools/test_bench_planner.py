"""No check of a plan passes with one that copies nothing, and sharding of pooled tables is no worse than its peers'."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tools.bench.cases.planner import checks_of


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
