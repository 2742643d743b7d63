"""A job of ranks whose inter-node link is emulated by waits, and whose plans a daemon verifies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable

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
            rows = collection({"item": flexd.Jagged(ids, torch.full((8,), 16))})["item"].values
            total = total + rows.square().sum()
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
