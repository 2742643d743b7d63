"""The ranking model of the cluster benchmark: its tables, verdicts, and a slice of it on an emulated cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torchrec_peer
from bench_ranking import OWN, checks_of, of_runs
from bench_ranking_data import DIMS, Setting, batches_of, scaled
from planner_problems import made_up_tables

from tests.support.repository import ROOT

pytestmark = pytest.mark.alone
SMALL = Setting(scaled(made_up_tables(20), 6, 16), samples=16, batches=2)


def test_a_list_is_scaled_and_keeps_its_busy_tables() -> None:
    tables = SMALL.listed()
    # Two of the six places in the order of traffic fall on one table.
    assert [table.name for table in tables] == [*(f"p{i}" for i in range(5)), "s0", "s1"]
    assert {table.bags for table in tables[:5]} == {1.0}
    assert [table.lookups for table in tables[5:]] == [40.0, 60.0]
    assert all(DIMS[0] // 4 * 4 <= table.dim <= DIMS[1] and table.dim % 4 == 0 for table in tables)
    busiest = max((t for t in made_up_tables(20) if t.bags), key=lambda t: t.lookups * t.dim)
    assert tables[0].lookups == min(busiest.lookups, 100.0)


def test_batches_have_the_look_ups_of_the_tables_and_differ_by_rank() -> None:
    first, other = batches_of(SMALL, 0)[0], batches_of(SMALL, 1)[0]
    for table in SMALL.listed():
        assert first.lengths[table.name].sum() == len(first.values[table.name])
        assert first.values[table.name].max() < table.rows
    assert (first.lengths["s1"] == 60).all()
    assert first.lengths["p0"].mean() == pytest.approx(SMALL.listed()[0].lookups, rel=0.4)
    assert not np.array_equal(first.values["s0"], other.values["s0"])


def run(own: float, flexd: float, unlimited: float, difference: float = 0.0) -> dict[str, Any]:
    def row(limited: float, free: float) -> dict[str, float]:
        return {"step_seconds": limited, "unlimited_step_seconds": free}

    return {
        "rows": {OWN: row(own, 0.1), "flexd": row(flexd, unlimited), "flexd, run-ahead": row(own, 1.0)},
        "loss_differences": {"flexd": difference},
    }


def failed(*runs: dict[str, Any], full_size: bool = True) -> list[str]:
    return [entry["name"] for entry in checks_of(of_runs(runs), full_size=full_size) if not entry["ok"]]


def test_verdicts_are_those_of_the_median_run_and_the_worst_losses() -> None:
    assert failed(run(0.3, 0.19, 0.1), run(0.3, 0.1, 0.1), run(0.3, 0.9, 0.1)) == []
    slower = "TorchRec's own plan over flexd: step"
    assert failed(run(0.3, 0.21, 0.11)) == [slower, f"{slower} on an unlimited link"]
    assert failed(run(0.3, 0.21, 0.11), full_size=False) == []
    assert failed(run(0.3, 0.19, 0.1), run(0.3, 0.19, 0.1, 3e-3)) == ["flexd: losses differ by"]


@pytest.mark.long
@pytest.mark.usefixtures("can_emulate")
def test_a_slice_of_the_benchmark() -> None:
    """Losses of all strategies agree, and flexd sends less than half of TorchRec's bytes."""
    command = [sys.executable, str(ROOT / "tools" / "bench_ranking.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    sent = {name.split("/")[1]: value for name, value in last["figures"].items() if name.endswith("/inter_node_bytes")}
    assert {"flexd", "flexd, run-ahead"} <= sent.keys()
    if torchrec_peer.missing() is None:
        assert len(sent) == 5
        assert sent["flexd"] < 0.6 * min(value for name, value in sent.items() if name.startswith("TorchRec"))
