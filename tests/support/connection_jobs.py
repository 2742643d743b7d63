"""Jobs of ranks: training with an agent, connected to a coordinator."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

import flexd
from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.connect import _agreed_attempt
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.row_optimizers import RowWiseAdagrad
from tests.support.collection_jobs import ROWS, some, tables, train_step


def connected(rank: int, layout: RankLayout, port: int, digest: int, limit: int) -> dict[str, Any]:
    """Train with a real agent until all ranks have the placement of this digest, and for three more steps."""
    collection = EmbeddingCollection(
        tables(), optimizer=RowWiseAdagrad(lr=0.1), layout=layout, replica_slots=[61, 23, 3]
    )
    connection = flexd.connect(collection, f"127.0.0.1:{port}", job="job", timeout_seconds=5.0)
    versions, equal, step, left = [], True, 0, 3
    while step < limit and left:
        train_step(collection, some(0, step, rank))
        equal &= collection.replicas_bit_equal()
        versions.append(collection.placement_version)
        step += 1
        left -= int(
            collection.engine.migrator.digest == digest
        )  # equal on all ranks: they apply chunks at the same step
    out = {
        "priced": collection.engine.inbox.priced_exchange,
        "steps": step, "versions": versions, "bit_equal": equal, "digest": collection.engine.migrator.digest,
        "listed": collection.engine.migrator.placement(), "state": connection.agent.state,
        "tables": {name: collection.gather_table(name).numpy() for name in ROWS},
        "accesses": sum(collection.traffic.totals()[f"{tier}_accesses"] for tier in ("home", "node", "device")),
    }  # fmt: skip
    connection.close(5.0)
    return out


def connected_alone(world_size: int, steps: int) -> dict[str, np.ndarray]:
    """Return the final tables of ``connected``, from plain tables and the formula of row-wise Adagrad."""
    start = EmbeddingCollection(tables(), layout=RankLayout(1, 1))
    weights = {name: start.initial_table(name) for name in ROWS}
    total = {name: torch.zeros(rows, 1, dtype=torch.float64) for name, rows in ROWS.items()}
    for step in range(steps):
        grads = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for rank in range(world_size):
            for name, jagged in some(0, step, rank).items():
                grads[name].index_add_(0, jagged.values, weights[name][jagged.values].cos() / world_size)
        for name, grad in grads.items():
            total[name] += grad.square().mean(dim=1, keepdim=True)
            weights[name] = weights[name] - 0.1 * grad / (total[name].sqrt() + 1e-8)
    return {name: weight.numpy() for name, weight in weights.items()}


def attempts(rank: int, run_ids: list[str]) -> list[str]:
    """Return the default attempt of one launch for each torchrun run id ("": not launched by torchrun)."""
    found = []
    groups = ChainGroups(RankLayout(1, 2), Traffic(), torch.device("cpu"))
    for run_id in run_ids:
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        if run_id:
            os.environ.update(TORCHELASTIC_RUN_ID=run_id, TORCHELASTIC_RESTART_COUNT="1")
        found.append(_agreed_attempt(groups, torch.device("cpu")))
    return found
