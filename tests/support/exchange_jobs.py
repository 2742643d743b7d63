"""Jobs of ranks: collectives, bytes and sums of a step."""

from typing import Any

import numpy as np
import torch

from flexd.core.placement import Delta, RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import SGD

ROWS = 40


def make(layout: RankLayout, dims: list[int], dtypes: list[str], moved: bool, **more: Any) -> EmbeddingCollection:
    tables = [
        EmbeddingTable(f"t{i}", ROWS, d, dtype=t, init_scale=0.5)
        for i, (d, t) in enumerate(zip(dims, dtypes, strict=True))
    ]
    collection = EmbeddingCollection(tables, layout=layout, optimizer=SGD(0.02), **more)
    if moved:
        keys = np.arange(ROWS * len(dims))
        collection.engine.inbox.offer(1, Delta(keys, np.zeros(len(keys), np.uint8), (keys % 3).astype(np.uint8)))
        with torch.no_grad():
            for _ in range(2):
                collection({})
    return collection


def batch(collection: EmbeddingCollection, seed: int) -> dict[str, Jagged]:
    rng = np.random.default_rng([seed, collection.rank])
    return {
        table.name: Jagged(torch.from_numpy((rng.zipf(1.3, 30) - 1) % ROWS), torch.tensor([30]))
        for table in collection.tables
    }


def step(collection: EmbeddingCollection, seeds: list[int]) -> float:
    losses = []
    for seed in seeds:
        loss = torch.stack([j.values.double().sin().sum() for j in collection(batch(collection, seed)).values()]).sum()
        loss.backward()
        losses.append(float(loss.detach()))
    collection.optimizer.step()
    return sum(losses)
