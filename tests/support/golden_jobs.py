"""A fixed job of ranks in float64: losses of the whole job, and bytes that one step sends to other nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.core.layout import MOVED, RankLayout, Tier
from flexd.core.placement import Delta

STEPS = 6
PLAIN = ("direct", "chain", "copies", "re-homed", "prefetch", "tiered storage")
POOLED = ("bags by rows", "bags by sums")
STRATEGIES = PLAIN + POOLED
TABLES = {"item": (4000, 8), "shop": (300, 16)}


def batch(step: int, rank: int) -> dict[str, flexd.Jagged]:
    rng = np.random.default_rng([35, step, rank])
    lengths = torch.full((32,), 10)
    return {
        name: flexd.Jagged(torch.from_numpy((rng.zipf(1.2, 320) - 1) % rows), lengths)
        for name, (rows, _) in TABLES.items()
    }


def collection_of(strategy: str, layout: RankLayout) -> flexd.EmbeddingCollection:
    given: dict[str, Any] = {"layout": layout, "optimizer": flexd.RowWiseAdagrad(lr=0.1), "replica_fraction": 0.2}
    if strategy in POOLED:
        tables = [
            flexd.EmbeddingBagTable(name, rows, dim, dtype="float64", answer=strategy.removeprefix("bags by "))
            for name, (rows, dim) in TABLES.items()
        ]
        return flexd.EmbeddingBagCollection(tables, **given)
    if strategy == "tiered storage":
        given["fast_memory_bytes"] = 50_000
    plain = [flexd.EmbeddingTable(name, rows, dim, dtype="float64") for name, (rows, dim) in TABLES.items()]
    return flexd.EmbeddingCollection(plain, exchange="direct" if strategy == "direct" else "chain", **given)


def moved_rows(strategy: str, collection: flexd.EmbeddingCollection) -> Delta:
    """Return copies of the most popular rows, or rows that leave the node of their home rule."""
    keys = np.concatenate([first + np.arange(40) for first in collection.keyspace.first_key[:2]])
    if strategy == "copies":
        tiers = np.where(np.arange(80) % 40 < 10, int(Tier.DEVICE), int(Tier.NODE))
    else:
        tiers = MOVED + 1 - collection.engine.homes.home_node(keys)
    return Delta(keys, np.zeros(80, np.uint8), tiers.astype(np.uint8))


def train(rank: int, nodes: int, local_ranks: int, strategy: str) -> tuple[list[float], int]:
    """Return the losses of the job, and the bytes sent to other nodes by all ranks."""
    collection = collection_of(strategy, RankLayout(nodes, local_ranks))
    if strategy in ("copies", "re-homed"):
        collection.engine.migrator.apply([collection.engine.migrator.prepare(moved_rows(strategy, collection), None)])
    batches = [batch(step, rank) for step in range(STEPS)]
    losses = []
    for features in flexd.prefetch(batches, collection) if strategy == "prefetch" else batches:
        out = collection(features)
        values = [part.values if isinstance(part, flexd.Jagged) else part for part in out.values()]
        loss = torch.stack([(value.tanh() ** 2).sum() for value in values]).sum() / 100
        loss.backward()
        collection.optimizer.step()
        losses.append(loss.detach())
    job = torch.stack(losses)
    dist.all_reduce(job)
    sent = torch.tensor([collection.traffic.all_to_all_inter_bytes + collection.traffic.sync_inter_bytes])
    dist.all_reduce(sent)
    return job.tolist(), int(sent)
