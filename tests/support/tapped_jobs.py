"""A job without a log, whose ranks all look up the same rows in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable

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
