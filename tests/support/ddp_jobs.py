"""Jobs of ranks: training with the dense part in DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flexd
from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingCollection
from tests.support.collection_jobs import some, tables


class Tower(nn.Module):
    """A dense layer; with ``collection`` the tables are part of the module, as in many trainers."""

    def __init__(self, collection: EmbeddingCollection | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.dense = nn.Linear(8, 4, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.dense.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        self.collection = collection

    def forward(self, inputs: Any) -> torch.Tensor:
        rows = inputs if self.collection is None else self.collection(inputs)["item"].values
        return self.dense(rows.tanh()).square().sum()


def ddp_with_run_ahead(rank: int, layout: RankLayout, inside: bool, steps: int) -> dict[str, np.ndarray]:
    """Run ``ddp`` with run-ahead: two threads have collectives under way at the same time."""
    collection = EmbeddingCollection(
        tables(names=("item",)), optimizer=flexd.SGD(0.05), layout=layout, replica_slots=[61]
    )
    model = DistributedDataParallel(Tower(collection if inside else None))
    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = [{"item": some(0, step, rank)["item"]} for step in range(steps)]
    for features in flexd.prefetch(loader, collection):
        loss = model(features if inside else collection(features)["item"].values)
        dense_optimizer.zero_grad()
        collection.optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        collection.optimizer.step()
    module = model.module
    return {"item": collection.gather_table("item").numpy(), "dense": module.dense.weight.detach().numpy()}


def ddp_alone(world_size: int, steps: int) -> dict[str, np.ndarray]:
    start = EmbeddingCollection(tables(names=("item",)), layout=RankLayout(1, 1))
    table, tower = nn.Embedding.from_pretrained(start.initial_table("item"), freeze=False), Tower()
    optimizer = torch.optim.SGD([*table.parameters(), *tower.parameters()], lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            (tower(table(some(0, step, rank)["item"].values)) / world_size).backward()
        optimizer.step()
    return {"item": table.weight.detach().numpy(), "dense": tower.dense.weight.detach().numpy()}
