"""The summary's figures on a record made by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.cli.blocks import Table
from flexd.cli.render import blocks_of
from flexd.control.daemon.migration import MigrationRecord
from flexd.demo.rank import TRAFFIC
from flexd.demo.runner import _broken_invariants
from flexd.demo.setup import DemoBatches, DemoOptions, EmulatedCluster, RunSetup
from flexd.demo.summary import RunRecord, summarise

STEPS = 40
SETUP = RunSetup(
    DemoOptions(cluster=EmulatedCluster(2, 1, 0.0), batches=DemoBatches(STEPS, batch_size=4)),
    Path("somewhere/trace.npz"), Path("d"), Path("l"), "t", 1, "127.0.0.1:1",
)  # fmt: skip
STEP = np.arange(STEPS)
APPLIED = (STEP == 10) | (STEP == 20)


def _plan(first: int, last: int, rows: int) -> MigrationRecord:
    return MigrationRecord(migration_id="p", plan_id="p", base_version=first - 1, last_version=last, rows_applied=rows)


def _record() -> RunRecord:
    """Two ranks; a chunk applied at steps 10 and 20; 100 bytes of exchange a step before, 40 + 20 sync after."""
    rank = {name: np.zeros(STEPS, np.int64) for name in TRAFFIC}
    rank["all_to_all_inter_bytes"] = np.where(STEP < 10, 100, 40)
    rank["sync_inter_bytes"] = np.where(STEP < 10, 0, 20)
    rank["migration_inter_bytes"] = np.where(APPLIED, 7, 0)
    rank["home_accesses"] = np.where(STEP < 10, 8, 2)
    rank["node_accesses"] = np.where(STEP < 10, 0, 5)
    rank["device_accesses"] = np.where(STEP < 10, 0, 1)
    rank["version"] = np.select([STEP < 10, STEP < 20], [0, 1], 2)
    rank["seconds"] = np.where(APPLIED, 0.030, 0.020)
    rank["seconds"][0] = 9.0
    rank["bit_equal"] = np.ones(9, bool)
    rank["publisher_dropped"] = np.array(3)
    first, second = ({name: array.copy() for name, array in rank.items()} for _ in range(2))
    first["loss"], second["loss"] = 2.0 - STEP * 0.01, 4.0 - STEP * 0.01
    first |= {"table/item": np.array([[1.0, 2.0]]), "dense/w": np.array([5.0])}
    reference = {
        "loss": np.stack([first["loss"], second["loss"]], axis=1) + 1e-12,
        "row_wise": np.full(STEPS, 1000), "row_wise_dedup": np.full(STEPS, 300),
        "samples": np.array("pieces"), "touches/rows_of_rank": np.array(7.5),
        "table/item": np.array([[1.0, 2.0 + 1e-13]]), "dense/w": np.array([5.0]),
    }  # fmt: skip
    return RunRecord(SETUP, (first, second), reference, (_plan(1, 1, 60), _plan(2, 2, 40), _plan(3, 3, 0)))


def test_the_figures_of_a_run() -> None:
    record = _record()
    found = summarise(record)
    summary = found.model_dump(mode="json")
    expected = {
        "trace": "trace.npz", "ranks": 2, "nodes": 2, "steps": STEPS,
        "plans": 2,  # the third was pushed as the training ended
        "migrated_rows": 100, "placement_version": 2, "compared_steps": {"before": [0, 4], "after": [36, 40]},
        "inter_node_bytes_per_step": {
            "row_wise": {"all_to_all": 1000, "sync": 0, "migration": 0, "total": 1000, "of_row_wise": 1.0},
            "row_wise_dedup": {"all_to_all": 300, "sync": 0, "migration": 0, "total": 300, "of_row_wise": 0.3},
            "before": {"all_to_all": 200, "sync": 0, "migration": 0, "total": 200, "of_row_wise": 0.2},
            "after": {"all_to_all": 80, "sync": 40, "migration": 0, "total": 120, "of_row_wise": 0.12},
        },
        "tier_access_share": {"home": 0.25, "node": 0.625, "device": 0.125},
        "replicas_bit_equal": True, "placement_versions_equal": True, "stream_accesses_dropped": 6,
    }  # fmt: skip
    assert {name: summary[name] for name in expected} == expected
    assert [summary["loss"][name] for name in ("first", "last")] == pytest.approx([3 - 0.015, 3 - 0.375])
    assert summary["difference_to_single_process"]["tables"] == pytest.approx(1e-13, rel=1e-2)
    assert summary["max_abs_difference_to_single_process"] == pytest.approx(1e-12, rel=1e-2)
    assert _broken_invariants(record, found) == []
    json.dumps(summary, allow_nan=False)


def _with_peers(record: RunRecord) -> RunRecord:
    """The same losses at other speeds: 80, 40 and 10 ms per step."""
    peers = {
        name: tuple(
            {"loss": rank["loss"].copy(), "seconds": np.full(STEPS, seconds + 0.002 * number)}
            for number, rank in enumerate(record.ranks)
        )
        for name, seconds in (("row_wise", 0.079), ("chain", 0.039), ("default", 0.009))
    }
    peers["default"][0]["tuning"] = np.array("chain, trial\n  chain 10.0 ms")
    options = replace(SETUP.options, cluster=EmulatedCluster(2, 1, 100.0))
    return replace(record, setup=replace(SETUP, options=options), peers=peers)


def test_step_times_by_strategy_over_the_last_tenth() -> None:
    assert summarise(_record()).step_ms.strategies == {}
    record = _with_peers(_record())
    record.ranks[0]["seconds"][36:] = 0.040
    found = summarise(record)
    assert found.link_mbit == 100.0
    assert (found.step_ms.before_plan, found.step_ms.after_plan) == pytest.approx((20.0, 30.0))
    medians = {name: times.p50 for name, times in found.step_ms.strategies.items()}
    assert found.step_ms.measured == ("chain, trial", "  chain 10.0 ms")
    assert medians == pytest.approx({"row_wise": 80.0, "chain": 40.0, "default": 10.0, "plans": 30.0})
    assert found.max_abs_difference_to_single_process == pytest.approx(1e-12, rel=1e-2)
    times, sent = (block for block in blocks_of(found) if isinstance(block, Table))
    assert (times.rows[-1][1], times.rows[-1][-1]) == ("30.0", "0.38")
    assert sent.rows[-1][-2:] == ("120 B", "0.12")


def test_a_peer_that_learns_something_else_is_seen() -> None:
    record = _with_peers(_record())
    record.peers["default"][1]["loss"][3] += 1e-3
    assert len(_broken_invariants(record, summarise(record))) == 1


@pytest.mark.parametrize(
    ("rank", "figure", "at", "value"),
    [
        (1, "bit_equal", 4, False), (1, "version", 15, 0), (0, "table/item", (0, 0), 1.00001), (1, "loss", 39, 7.0),
        (0, "table/item", (0, 0), np.nan), (0, "dense/w", 0, np.nan), (1, "loss", 39, np.nan),
    ],
)  # fmt: skip
def test_every_broken_promise_is_seen(rank: int, figure: str, at: Any, value: float) -> None:
    record = _record()
    record.ranks[rank][figure][at] = value
    assert len(_broken_invariants(record, summarise(record))) == 1
