"""One rank of tools/bench_rule_change.py: trains pooled tables while their home rules may change."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.core.layout import RankLayout

DIM = 16
ROW_BYTES = 8 * DIM
CAP_BYTES = 64 * ROW_BYTES
"""Of rows that move at one step."""


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        rows, lengths: of each table, and ids of a bag in it.
        rules: home rule of each table.
        grown: the table whose bags get ten times the ids.
        grows_at: step from which on they do.
        bags: of a rank and step.
        steps: of the training; with a daemon it goes on for so many after the rules have changed.
        spare: home slots of each rank.
        address: of the daemon; empty: without.
    """

    layout: RankLayout
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    rules: tuple[str, ...]
    grown: int
    grows_at: int
    bags: int
    steps: int
    spare: int = 0
    address: str = ""


def ids_of(job: Job, step: int, rank: int, table: int) -> np.ndarray:
    """Return int64 [bags x length] ids of a table, Zipf over a permutation of its rows."""
    length = job.lengths[table] * (10 if table == job.grown and step >= job.grows_at else 1)
    rows = job.rows[table]
    drawn = np.random.default_rng([step, rank, table]).zipf(1.2, job.bags * length) - 1
    return np.random.default_rng(table).permutation(rows)[drawn % rows]


def run(rank: int, port: int, job: Job, changed: Any, answers: Any) -> None:
    """Train; put (rank, losses, bytes sent to the other node by step, bytes moved by step, first step after the change,
    rules) into ``answers``.

    Args:
        changed: 1 once the rules have changed.
    """
    layout = job.layout
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(layout.world_size),
        LOCAL_WORLD_SIZE=str(layout.local_ranks), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tables = flexd.EmbeddingBagCollection(
        [
            flexd.EmbeddingBagTable(f"t{at}", rows, DIM, dtype="float64", answer="sums", homes=rule)
            for at, (rows, rule) in enumerate(zip(job.rows, job.rules, strict=True))
        ],
        optimizer=flexd.SGD(1e-4), layout=layout, spare_home_slots=[job.spare],
        max_migration_bytes_per_step=CAP_BYTES,
    )  # fmt: skip
    connection = flexd.connect(tables, job.address, job="bench", attempt="one") if job.address else None
    losses: list[float] = []
    sent: list[int] = []
    moved: list[int] = []
    after = -1
    while len(losses) < (job.steps if after < 0 and not job.address else after + job.steps if after >= 0 else 10**6):
        before = tables.traffic.totals()
        losses.append(_step(tables, job, len(losses)))
        now = tables.traffic.totals()
        differs = {name: now[name] - before[name] for name in now}
        moved.append(differs["migration_intra_bytes"] + differs["migration_inter_bytes"])
        sent.append(differs["all_to_all_inter_bytes"] - differs["migration_inter_bytes"])
        if job.address and after < 0:
            done = torch.tensor([changed.value])
            dist.all_reduce(done, dist.ReduceOp.MIN)
            after = len(losses) if int(done) else -1
    answers.put((rank, losses, sent, moved, after, [str(rule) for rule in tables.engine.homes.rules]))
    if connection is not None:
        connection.close(10.0)
    dist.barrier()
    dist.destroy_process_group()


def _step(tables: flexd.EmbeddingBagCollection, job: Job, step: int) -> float:
    features = {}
    for at in range(len(job.rows)):
        ids = torch.from_numpy(ids_of(job, step, tables.rank, at))
        features[f"t{at}"] = flexd.Jagged(ids, torch.full((job.bags,), len(ids) // job.bags))
    loss = torch.stack([sums.tanh().square().sum() for sums in tables(features).values()]).sum()
    loss.backward()
    tables.optimizer.step()
    return float(loss.detach())
