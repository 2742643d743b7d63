"""A daemon, a process without a list of tables, and trainers that were moved to flexd in place: rows migrate while
they train, and training is that of the unchanged model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flexd
from flexd.config.tables_file import load_tables
from flexd.core.layout import RankLayout
from flexd.topology.cluster import Cluster, CollectiveCurve, LinkModel
from flexd.topology.files import write_cluster
from tests.support import trainer_jobs
from tests.support.flexd_processes import RunningDaemon
from tests.support.rank_pool import RankPool
from tests.support.until import until

LAYOUT = RankLayout(2, 1)
LR = 0.01
PLAIN_TABLES = {
    "replaced": [
        ("user", 41, 8, "float32"), ("shop", 17, 8, "float32"), ("tag", 23, 4, "float32"), ("item", 61, 8, "float32"),
        ("word", 29, 4, "float32"),
    ],
    "embedded": [
        ("items", trainer_jobs.ITEMS, trainer_jobs.DIM, "float64"),
        ("users.embedding", trainer_jobs.USERS, trainer_jobs.DIM, "float64"),
    ],
}  # fmt: skip
"""Name, rows, dim and dtype of the tables of each kind of trainer."""


def tolerance(kind: str) -> float:
    """Return how far losses and rows may differ after some thousand steps: TorchRec's rows are float32."""
    return 1e-9 if kind == "embedded" else 1e-4


def trained(rank: int, kind: str, port: int, stop: Path, pause: float, limit: int, counts: bool) -> dict[str, Any]:
    """Train under a daemon at ``port`` until the file ``stop`` exists, and for three more steps.

    Args:
        kind: "replaced" or "embedded".
        pause: seconds between two steps.
        counts: with a tap.
    """
    step_of, tables, tables_now = (_replaced if kind == "replaced" else _embedded)(rank)
    tap = flexd.Tap(tables, interval_steps=5) if counts else None
    connection = flexd.connect(tables, f"127.0.0.1:{port}", job="test", timeout_seconds=5.0, tap=tap)
    losses, listed, equal, left, ended = [], [], True, 3, torch.zeros(1)
    while len(losses) < limit and left:
        losses.append(step_of(len(losses)))
        listed.append(len(tables.engine.migrator.placement()[0]))
        equal &= tables.replicas_bit_equal()
        time.sleep(pause)
        ended[0] = float(stop.exists())
        dist.broadcast(ended, 0)
        left -= int(ended.item())
    out = {
        "losses": losses, "listed": listed, "equal": equal, "state": connection.agent.state, "tables": tables_now(),
        "version": tables.placement_version,
    }  # fmt: skip
    connection.close(5.0)
    return out


Job = tuple[Callable[[int], float], Any, Callable[[], dict[str, torch.Tensor]]]


def _replaced(rank: int) -> Job:
    from flexd.torchrec import replace
    from tests.support import torchrec_models

    model = torchrec_models.make()
    tables = replace(model, optimizer=flexd.SGD(LR), layout=LAYOUT, replica_slots=[80, 40])
    parallel = DistributedDataParallel(model)
    dense = torch.optim.SGD(parallel.parameters(), lr=LR)

    def step(number: int) -> float:
        loss = parallel(*torchrec_models.batch(number, rank))
        dense.zero_grad()
        loss.backward()
        dense.step()
        tables.optimizer.step()
        return float(loss.detach())

    return step, tables, lambda: {name: tables.gather_table(name) for name in torchrec_models.ROWS}


def _embedded(rank: int) -> Job:
    model = trainer_jobs.Recommender(softmax=False)
    tables = flexd.embed_all(
        model, optimizer=flexd.SGD(LR), layout=LAYOUT, replica_slots=[trainer_jobs.ITEMS + trainer_jobs.USERS]
    )
    parallel = DistributedDataParallel(model)
    optimizer = flexd.JoinedOptimizer(torch.optim.SGD(parallel.parameters(), lr=LR), tables.optimizer)

    def step(number: int) -> float:
        loss = parallel(trainer_jobs.batch(number, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, tables, lambda: {table.name: tables.gather_table(table.name) for table in tables.tables}


def plain(kind: str, steps: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Train the unchanged model in one process on the batches of both ranks; return losses by rank, and its tables."""
    model: torch.nn.Module
    if kind == "replaced":
        from tests.support import torchrec_models

        model = torchrec_models.make()
    else:
        model = trainer_jobs.Recommender(softmax=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses: list[list[float]] = [[], []]
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(2):
            loss = (
                model(*torchrec_models.batch(step, rank))
                if kind == "replaced"
                else model(trainer_jobs.batch(step, rank))
            )
            (loss / 2).backward()
            losses[rank].append(float(loss.detach()))
        optimizer.step()
    if kind == "replaced":
        return losses, torchrec_models.plain_tables(model)
    weights = {name: module.weight.detach() for name, module in model.named_modules() if hasattr(module, "padding_idx")}
    return losses, weights


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
            target=lambda: results.extend(ranks(2).run(trained, kind, port, stop, 0.05, 3_000, True, timeout=150))
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
