"""Real ranks and a daemon that measures its plans: those that slow the job down do not stay, those that win do."""

import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flexd
from flexd.core.placement import RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.topology.cluster import Cluster, CollectiveCurve, LinkModel
from flexd.topology.files import write_cluster
from tests.support.flexd_processes import RunningDaemon
from tests.support.flexd_processes import flexd as run_flexd
from tests.support.rank_pool import Ranks
from tests.support.until import until

ROWS, DIM, MICRO_BATCHES = 2_000, 16, 4


def verified(
    rank: int, port: int, stop: Path, seconds_per_home_access: float, seconds_with_copies: float, steps: int
) -> dict[str, Any]:
    """Train until the file ``stop`` exists.

    Args:
        seconds_per_home_access: the wait of a slow link for a look-up that no copy answers.
        seconds_with_copies: what a step takes longer while any row has copies: the latency of their synchronisation.
        steps: the most steps.
    """
    collection = EmbeddingCollection([EmbeddingTable("item", ROWS, DIM)], layout=RankLayout(2, 2), replica_slots=[ROWS])
    tap = flexd.Tap(collection, interval_steps=5)
    connection = flexd.connect(collection, f"127.0.0.1:{port}", job="verified", timeout_seconds=10.0, tap=tap)
    rng = np.random.default_rng(rank)
    popularity = np.arange(1, ROWS + 1) ** -1.2
    popularity /= popularity.sum()
    before, step = 0, 0
    ended = torch.zeros(1)
    while step < steps:
        total = 0.0
        for _ in range(MICRO_BATCHES):
            ids = torch.from_numpy(rng.choice(ROWS, 128, p=popularity))
            total = total + collection({"item": flexd.Jagged(ids, torch.full((8,), 16))})["item"].values.square().sum()
        total.backward()
        collection.optimizer.step()
        now = collection.traffic.totals()["home_accesses"]
        listed = len(collection.engine.migrator.placement()[0]) > 0
        time.sleep((now - before) * seconds_per_home_access + seconds_with_copies * listed)
        before, step = now, step + 1
        ended[0] = float(stop.exists())
        dist.broadcast(ended, 0)
        if ended.item():
            break
    bit_equal = collection.replicas_bit_equal()
    out = {"steps": step, "bit_equal": bit_equal, "listed": len(collection.engine.migrator.placement()[0])}
    connection.close(10.0)
    return out


pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(400)]

SLOW_BYTE = 4e-6
"""Seconds of a byte between nodes, in the prices."""


@pytest.mark.parametrize(
    ("seconds_per_home_access", "seconds_with_copies", "verdict"),
    [(4e-4, 0.0, "faster"), (0.0, 0.1, "slower")],
    ids=["copies win", "copies lose"],
)
def test_the_ranks_decide_whether_a_plan_stays(
    tmp_path: Path,
    ranks: Ranks,
    seconds_per_home_access: float,
    seconds_with_copies: float,
    verdict: str,
) -> None:
    # A slow link without latency, with which copies pay.
    fast, slow = (CollectiveCurve(0.0, ((1.0, speed),)) for speed in (1e10, 1 / SLOW_BYTE))
    links = LinkModel(1e10, fast, fast, fast), LinkModel(1 / SLOW_BYTE, slow, slow, slow)
    write_cluster(Cluster("test", "given", *links), tmp_path / "topology.yaml")
    settings = {
        "job": "verified",
        "tables": [{"name": "item", "rows": ROWS, "dim": 16}],
        "stream": {"source": {"kind": "tap"}, "poll_seconds": 0.02},
        "topology": {"file": str(tmp_path / "topology.yaml")},
        "planner": {
            # One plan, as the ranks are there: after a verdict one of another kind would be made, and measured too.
            "interval_seconds": 600.0, "drift_threshold": None, "min_samples": 20_000,
            "min_coverage": 0.1, "horizon_steps": 1e9,
        },
    }  # fmt: skip
    results: list[Any] = []
    stop = tmp_path / "stop"
    with RunningDaemon(tmp_path, settings) as daemon:
        job = threading.Thread(
            target=lambda: results.extend(
                ranks(4).run(
                    verified, daemon.config.control.listen_port, stop, seconds_per_home_access,
                    seconds_with_copies, 50_000, timeout=380,
                )
            )
        )  # fmt: skip
        job.start()
        try:

            def ended() -> dict[str, Any] | None:
                verification = daemon.status()["planning"]["verification"]
                newest = verification["newest"]
                return verification if newest is not None and newest["state"] != "running" else None

            verification = until(ended, 240, what=lambda: daemon.status()["planning"])
            newest = verification["newest"]
            assert newest["state"] == verdict, verification
            assert newest["rolled_back"] == (verdict == "slower")
            migration_id = newest["migration_id"]
            last = "rollback" if verdict == "slower" else "verify"
            # The newest move ends after the verdict.
            until(
                lambda: daemon.status()["migration"]["state"] == "committed"
                and f".{last}" in daemon.status()["migration"]["migration_id"],
                60, what=lambda: daemon.status()["migration"],
            )  # fmt: skip
            shown = run_flexd("describe", "migration", migration_id, "--url", daemon.url)
            assert re.search(rf"message .* % {verdict} ", shown.stdout), shown
            assert "% interval" in shown.stdout.replace("\n", " ")
            assert daemon.metrics()[f"flexd_verifications_total{{{verdict}}}"] == 1.0
            assert bool(verification["held"]) == (verdict == "slower")
            if verdict == "faster":
                # The journal has the placement before the plan also after all moves of the verification.
                run_flexd("rollback", "latest", "--reason", "no copies today", "--yes", "--url", daemon.url)
                newest = daemon.status()["migration"]
                assert (newest["migration_id"], newest["state"]) == (f"{migration_id}.rollback", "committed")
                (held,) = daemon.status()["planning"]["verification"]["held"]
                assert f"{migration_id} was rolled back by " in held
                assert ": no copies today; plans for " in held
        finally:
            stop.touch()
            job.join(60)
    assert len(results) == 4
    assert all(result["bit_equal"] for result in results)
    assert [result["listed"] for result in results] == [0] * 4, "held back: no further plan was carried out"
