"""Strategies of ``bench_tables`` on a small list."""

from __future__ import annotations

import bench_tables
import pytest
from planner_problems import made_up_tables

from flexd.core.layout import RankLayout


@pytest.fixture(scope="module")
def case():
    tables = [table for table in made_up_tables(20) if table.bags > 0]
    return bench_tables.compare("small", tables, RankLayout(2, 2), evaluations=300)


def test_flexd_is_no_slower_than_any_strategy(case):
    named = {row["strategy"]: row for row in case["strategies"]}
    assert {"all, rows", "random (median)", "size greedy", "dim greedy", "lookup greedy", "flexd"} <= named.keys()
    fitting = [row["milliseconds"] for row in named.values() if row.get("fits")]
    assert named["flexd"]["milliseconds"] <= min(fitting) * (1 + 1e-9)
    assert named["flexd"]["bound_milliseconds"] <= named["flexd"]["milliseconds"]
    assert 0 <= named["flexd"]["gap"] <= 1
    assert all(0 <= row["balance"] <= 1 for row in named.values() if "balance" in row)


def test_a_slower_flexd_is_reported(case):
    slower = [row | {"milliseconds": 1e9} if row["strategy"] == "flexd" else row for row in case["strategies"]]
    figures = {"cases": [case | {"strategies": slower}], "torchrec": [], "large": [{}], "peak_gibibytes": 0.1}
    found = bench_tables.checks(figures, quick=True)
    assert [entry["ok"] for entry in found] == [False, True]


def test_torchrecs_own_planner_is_a_row_in_its_exchange():
    pytest.importorskip("torchrec")
    tables = [table for table in made_up_tables(6) if table.bags > 0]
    found = bench_tables.compare_in_torchrec("small", tables, RankLayout(2, 2))
    priced = {row["strategy"]: row["milliseconds"] for row in found["strategies"]}
    assert priced.keys() == {"row-wise", "flexd shard", "TorchRec's planner"}
    assert priced["flexd shard"] <= min(priced.values()) * (1 + 1e-9)
    figures = {"cases": [], "torchrec": [found], "large": [{}], "peak_gibibytes": 0.1}
    assert bench_tables.checks(figures, quick=True)[0]["ok"]
