"""A daemon, a process without a list of tables, and trainers that were moved to flexd in place: rows migrate while
they train, and training is that of the unchanged model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from flexd.config.tables_file import load_tables
from flexd.topology.cluster import Cluster, CollectiveCurve, LinkModel
from flexd.topology.files import write_cluster
from tests.support import any_trainer_jobs
from tests.support.any_trainer_jobs import PLAIN_TABLES, plain, tolerance
from tests.support.flexd_processes import RunningDaemon
from tests.support.rank_pool import RankPool
from tests.support.until import until

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(200)]


@pytest.mark.parametrize("kind", ["replaced", "embedded"])
def test_rows_migrate_while_a_moved_trainer_trains(tmp_path: Path, ranks: Callable[[int], RankPool], kind: str) -> None:
    if kind == "replaced" and find_spec("torchrec") is None:
        pytest.skip("TorchRec is not here: make torchrec")
    fast, slow = (CollectiveCurve(0.0, ((1.0, speed),)) for speed in (1e10, 1e6))
    all_to_all = CollectiveCurve(0.0, ((1.0, 2.5e5),))
    write_cluster(
        Cluster("test", "given", LinkModel(1e10, fast, fast, fast), LinkModel(1e6, all_to_all, slow, slow)),
        tmp_path / "topology.yaml",
    )
    settings = {
        "stream": {"source": {"kind": "tap"}, "poll_seconds": 0.02},
        "topology": {"file": str(tmp_path / "topology.yaml")},
        "planner": {
            "interval_seconds": 2.0, "drift_threshold": None, "min_samples": 500, "min_coverage": 0.1,
            "horizon_steps": 1e9, "min_saving": {"seconds": 0.0, "share": 0.0},
        },
    }  # fmt: skip
    results: list[Any] = []
    stop = tmp_path / "stop"
    with RunningDaemon(tmp_path, settings) as daemon:
        port = daemon.config.control.listen_port
        job = threading.Thread(
            target=lambda: results.extend(
                ranks(2).run(any_trainer_jobs.trained, kind, port, stop, 0.05, 3_000, True, timeout=150)
            )
        )
        job.start()
        try:

            def committed() -> bool:
                migration = daemon.status().get("migration") or {}
                return migration.get("state") == "COMMITTED"

            until(committed, 90, lambda: {k: daemon.status().get(k) for k in ("reasons", "planning", "last_plan")})
        finally:
            stop.touch()
            job.join(60)
        known = [(t.name, t.rows, t.dim, t.dtype) for t in load_tables(daemon.config.state.dir)]
        assert known == PLAIN_TABLES[kind]
    assert len(results) == 2
    steps = len(results[0]["losses"])
    losses, tables = plain(kind, steps)
    for rank, result in enumerate(results):
        assert result["equal"]
        assert result["version"] > 0, result["state"]
        assert result["listed"][0] == 0 < result["listed"][-1]
        assert result["losses"] == pytest.approx(losses[rank], abs=tolerance(kind))
        for name, table in tables.items():
            torch.testing.assert_close(result["tables"][name], table, rtol=tolerance(kind), atol=tolerance(kind))
