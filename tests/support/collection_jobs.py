"""Jobs of ranks: small tables with skewed batches, evaluation, construction."""

from __future__ import annotations

import numpy as np
import torch

from flexd.core.placement import REHOMED, Delta, Placement, RankLayout
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.features import Jagged

ROWS = {"item": 61, "odd": 23, "tiny": 3}
"""``tiny`` has fewer rows than a world of four ranks."""


def tables(dtype: str = "float64", names: tuple[str, ...] = tuple(ROWS)) -> list[EmbeddingTable]:
    dims = {"item": 8, "odd": 3, "tiny": 2}
    return [EmbeddingTable(name, ROWS[name], dims[name], dtype=dtype, init_scale=0.5) for name in names]


def some(seed: int, step: int, rank: int) -> dict[str, Jagged]:
    """Return skewed ids of every table, sometimes none."""
    rng = np.random.default_rng([seed, step, rank])
    out = {}
    for name, rows in ROWS.items():
        count = int(rng.integers(0, 40))
        ids = torch.from_numpy((rng.zipf(1.3, count) - 1) % rows)
        out[name] = Jagged(ids, torch.tensor([count]))
    return out


def loss_of(out: dict[str, Jagged]) -> torch.Tensor:
    return torch.stack([jagged.values.double().sin().sum() for jagged in out.values()]).sum()


def train_step(collection: EmbeddingCollection, features: dict[str, Jagged]) -> None:
    loss_of(collection(features)).backward()
    collection.optimizer.step()


def offer(collection: EmbeddingCollection, delta: Delta) -> None:
    collection.engine.inbox.offer(collection.engine.inbox._received_version + 1, delta)


def random_placement(seed: int, rows: int = 50, moves_on: RankLayout | None = None) -> Placement:
    """Return a placement with copies of some rows; with ``moves_on`` a part of them are in other nodes instead."""
    rng = np.random.default_rng(seed)
    keys = rng.choice(sum(ROWS.values()), size=rows, replace=False).astype(np.int64)
    tiers = rng.integers(1, 3, size=rows).astype(np.uint8)
    if moves_on is not None and moves_on.nodes > 1:
        to = (moves_on.home_node(keys) + rng.integers(1, moves_on.nodes, size=rows)) % moves_on.nodes
        tiers = np.where(rng.random(rows) < 0.5, REHOMED + to, tiers).astype(np.uint8)
    return Placement.of(keys, tiers)
