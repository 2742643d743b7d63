"""Jobs of ranks whose own trainer was moved to flexd: a replaced TorchRec model, or embeddings of a PyTorch model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flexd
from flexd.core.layout import RankLayout
from tests.support import trainer_jobs

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
