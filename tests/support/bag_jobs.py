"""Training on pooled features, on ranks and in one process with ``nn.EmbeddingBag``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

import flexd
import flexd.core.errors
from flexd.core.placement import Delta, RankLayout
from tests.support.prefetch_pipeline_jobs import other_arm

STEPS = 8
READS = {"history": "item", "basket": "item", "shop": "shop"}


PoolingPlaces = tuple[str, str]
ROWS = ("requester", "requester")


ROW_WISE = ("row_wise", "row_wise")


def tables(pooling_at: PoolingPlaces = ROWS, homes: tuple[str, str] = ROW_WISE) -> list[flexd.EmbeddingTable]:
    (first, second), (of_item, of_shop) = pooling_at, homes
    item = flexd.EmbeddingBagTable("item", 61, 8, ("history", "basket"), "float64", init_scale=0.5, pooling_at=first)
    shop = flexd.EmbeddingBagTable("shop", 17, 5, (), "float64", init_scale=0.5, pooling="mean", pooling_at=second)
    return [replace(item, sharding=of_item), replace(shop, sharding=of_shop)]


def batch(step: int, rank: int) -> tuple[dict[str, flexd.Jagged], dict[str, torch.Tensor]]:
    """Make skewed ids with empty bags and batches without samples or features; every other step has weights. Those of
    every fourth step have gradients, for one of the two features of their table."""
    rng = np.random.default_rng([3, step, rank])
    samples = int(rng.integers(0, 5))
    features = {}
    for name, rows in (("history", 61), ("basket", 61), ("shop", 17)):
        if rng.random() < 0.15:
            continue
        lengths = rng.integers(0, 7, size=samples)
        ids = (rng.zipf(1.3, int(lengths.sum())) - 1) % rows
        features[name] = flexd.Jagged(torch.from_numpy(ids), torch.from_numpy(lengths))
    weights = {}
    if step % 2 and "history" in features:
        weights["history"] = torch.from_numpy(rng.normal(size=features["history"].values.numel()))
        weights["history"].requires_grad_(step % 4 == 1)
    if step % 2 and "basket" in features and rank % 2 == 0:
        weights["basket"] = torch.from_numpy(rng.normal(size=features["basket"].values.numel()))
    return features, weights


def loss_of(pooled: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.sin().sum() + part.square().sum() for part in pooled.values()] or [torch.zeros(())]).sum()


def train(
    rank: int,
    layout: RankLayout,
    exchange: str,
    ahead: bool,
    switch_every: int = 0,
    pooling_at: PoolingPlaces = ROWS,
    homes: tuple[str, str] = ROW_WISE,
) -> dict[str, Any]:
    collection = flexd.EmbeddingBagCollection(
        tables(pooling_at, homes), optimizer=flexd.SGD(0.1), layout=layout, replica_slots=[61, 17], exchange=exchange
    )
    inbox = collection.engine.inbox
    losses, weight_grads, equal = [], [], True
    batches: Any = [batch(step, rank) for step in range(STEPS)]
    loop = flexd.prefetch(batches, collection, features=lambda both: both[0]) if ahead else batches
    for step, (features, weights) in enumerate(loop):
        if switch_every and step % switch_every == 1 and rank == step % layout.world_size:
            collection.engine.arm.propose(other_arm(collection, step))
        if step == 2:
            keys = np.arange(0, 78, 2)
            keys = keys[~np.isin(keys, collection.engine.homes.copied_keys)]
            delta = Delta(keys, np.zeros(len(keys), np.uint8), (np.arange(len(keys)) % 2 + 1).astype(np.uint8))
            inbox.offer(inbox._received_version + 1, delta)
        loss = loss_of(collection(features, weights if step % 2 else None))
        if loss.requires_grad:
            loss.backward()
        collection.optimizer.step()
        losses.append(float(loss.detach()))
        weight_grads.append({name: factors.grad for name, factors in weights.items()})
        equal &= collection.replicas_bit_equal()
    return {
        "losses": losses, "weight_grads": weight_grads, "equal": equal, "version": collection.placement_version,
        "tables": {table.name: collection.gather_table(table.name) for table in collection.tables},
    }  # fmt: skip


def train_alone(world_size: int) -> tuple[list[list[float]], list[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    start = flexd.EmbeddingBagCollection(tables(), layout=RankLayout(1, 1))
    bags = {
        table.name: nn.EmbeddingBag.from_pretrained(
            start.initial_table(table.name), freeze=False, mode=table.pooling, include_last_offset=True
        )
        for table in start.tables
    }
    optimizer = torch.optim.SGD([bag.weight for bag in bags.values()], lr=0.1)
    losses: list[list[float]] = [[] for _ in range(world_size)]
    weight_grads: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            features, weights = batch(step, rank)
            loss = loss_of(
                {
                    name: bags[READS[name]](ids.values, ids.offsets, per_sample_weights=weights.get(name))
                    for name, ids in features.items()
                }
            )
            if loss.requires_grad:
                (loss / world_size).backward()
            losses[rank].append(float(loss.detach()))
            weight_grads[rank].append({n: None if w.grad is None else w.grad * world_size for n, w in weights.items()})
        optimizer.step()
    return losses, weight_grads, {name: bag.weight.detach() for name, bag in bags.items()}
