"""Jobs of ranks: training steps measured by phase."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import flexd
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.collection import EmbeddingCollection
from tests.support.collection_jobs import offer, some, tables, train_step


def measured(rank: int, layout: RankLayout, ahead: bool) -> tuple[float, Any, dict[str, int]]:
    """Train; return the seconds, the phases and the bytes sent by link."""
    collection = EmbeddingCollection(tables(), layout=layout, replica_slots=[61, 23, 3])
    offer(collection, Delta(np.arange(20), np.zeros(20, np.uint8), np.arange(20, dtype=np.uint8) % 2 + 1))
    batches = [some(0, step, rank) for step in range(8)]
    train_step(collection, batches[0])
    train_step(collection, batches[1])
    collection.phases.drain()
    before, started = collection.traffic.totals(), time.perf_counter()
    for batch in flexd.prefetch(batches[2:], collection) if ahead else batches[2:]:
        train_step(collection, batch)
    collection.engine.settle()
    phases, _ = collection.phases.drain()
    wall = time.perf_counter() - started
    sent = {name: value - before[name] for name, value in collection.traffic.totals().items()}
    return (
        wall,
        phases,
        {
            link: sum(sent[f"{kind}_{link}_bytes"] for kind in ("all_to_all", "sync", "migration"))
            for link in ("intra", "inter")
        },
    )
