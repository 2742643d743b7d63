"""A job without a log: the taps of its ranks tell the daemon which ranks need a row in one step, and it plans so."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flexd
from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.topology.cluster import Cluster, CollectiveCurve, LinkModel
from flexd.topology.files import write_cluster
from tests.support.flexd_processes import RunningDaemon
from tests.support.flexd_processes import flexd as run_flexd
from tests.support.rank_pool import RankPool
from tests.support.until import until

ROWS, DIM, LOOK_UPS = 2_000, 16, 64


def alike(rank: int, port: int, stop: Path, steps: int) -> dict[str, Any]:
    """Train until the file ``stop`` exists, at most so many steps."""
    collection = EmbeddingCollection([EmbeddingTable("item", ROWS, DIM)], layout=RankLayout(2, 2), replica_slots=[ROWS])
    tap = flexd.Tap(collection, interval_steps=10, touch_steps=2)
    connection = flexd.connect(collection, f"127.0.0.1:{port}", job="tapped", timeout_seconds=10.0, tap=tap)
    popularity = np.arange(1, ROWS + 1) ** -0.8
    popularity /= popularity.sum()
    ended = torch.zeros(1)
    step = 0
    while step < steps and not ended.item():
        ids = torch.from_numpy(np.random.default_rng(step).choice(ROWS, LOOK_UPS, p=popularity))
        rows = collection({"item": flexd.Jagged(ids, torch.full((8,), LOOK_UPS // 8))})["item"].values
        rows.square().sum().backward()
        collection.optimizer.step()
        step += 1
        ended[0] = float(stop.exists())
        dist.broadcast(ended, 0)
    counters = tap.counters
    out = {
        "bit_equal": collection.replicas_bit_equal(),
        "listed": len(collection.engine.migrator.placement()[0]),
        "failures": counters.failures,
    }
    connection.close(10.0)
    return out


pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(300)]


def test_a_plan_uses_the_touches_of_taps_with_and_without_copies(
    tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    fast, slow = (CollectiveCurve(0.0, ((1.0, speed),)) for speed in (1e10, 1e6))
    all_to_all = CollectiveCurve(0.0, ((1.0, 2.5e5),))
    write_cluster(
        Cluster("test", "given", LinkModel(1e10, fast, fast, fast), LinkModel(1e6, all_to_all, slow, slow)),
        tmp_path / "topology.yaml",
    )
    settings = {
        "job": "tapped",
        "tables": [{"name": "item", "rows": ROWS, "dim": DIM}],
        "stream": {"source": {"kind": "tap"}, "poll_seconds": 0.02},
        "topology": {"file": str(tmp_path / "topology.yaml")},
        "planner": {
            "interval_seconds": 3.0, "drift_threshold": None, "min_samples": 20_000, "min_coverage": 0.1,
            "horizon_steps": 1e9, "min_saving": {"seconds": 0.0, "share": 0.0},
        },
    }  # fmt: skip
    results: list[Any] = []
    stop = tmp_path / "stop"
    with RunningDaemon(tmp_path, settings) as daemon:
        port = daemon.config.control.listen_port
        job = threading.Thread(target=lambda: results.extend(ranks(4).run(alike, port, stop, 200_000, timeout=280)))
        job.start()
        try:

            def explained() -> list[dict[str, Any]]:
                shown = run_flexd("explain", "item", "--hottest", 40, "-o", "json", "--url", daemon.url)
                return json.loads(shown.stdout)["explained"] if shown.returncode == 0 else []

            def needed_together() -> list[dict[str, Any]] | None:
                """Return the rows of middling frequency if the daemon knows that all ranks need them together."""
                rows = [row for row in explained() if row["per_rank"] and 0.1 < row["per_rank"] < 0.6]
                return rows if rows and all(row["anywhere"] < 1.02 * row["per_rank"] for row in rows) else None

            until(needed_together, 120, what=explained)
            until(
                lambda: daemon.status()["migration"]["state"] == "COMMITTED", 60,
                what=lambda: daemon.status()["migration"],
            )  # fmt: skip
            steps = daemon.status()["stream"]["accesses"]
            until(lambda: daemon.status()["stream"]["accesses"] > 2 * steps, 240, what=daemon.status)
            assert until(needed_together, 20, what=explained), "copies that answer on the rank are counted too"
        finally:
            stop.touch()
            job.join(60)
    assert len(results) == 4
    assert all(each["bit_equal"] and each["listed"] and not each["failures"] for each in results), results
