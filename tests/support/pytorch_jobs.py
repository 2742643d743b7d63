"""Jobs of ranks: training with a collection among other parts of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import flexd
from flexd.core.placement import Delta, RankLayout

ROWS, DIM, STEPS = 40, 8, 4


class Tower(nn.Module):
    """Two dense layers: from rows [n, DIM] to a loss."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second = nn.Linear(DIM, 6, dtype=dtype), nn.Linear(6, 2, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows).tanh()).square().sum()


class Model(nn.Module):
    """A model with the tables inside."""

    def __init__(self, collection: flexd.EmbeddingCollection, tower: nn.Module | None = None) -> None:
        super().__init__()
        self.items = collection
        self.tower = tower or Tower()

    def forward(self, features: dict[str, flexd.Jagged]) -> torch.Tensor:
        loss: torch.Tensor = self.tower(self.items(features)["item"].values)
        return loss


def collection_of(layout: RankLayout, dtype: str = "float64", **more: Any) -> flexd.EmbeddingCollection:
    table = flexd.EmbeddingTable("item", ROWS, DIM, dtype=dtype, init_scale=0.5)
    return flexd.EmbeddingCollection([table], optimizer=flexd.SGD(0.01), layout=layout, replica_slots=[20], **more)


def ids(step: int, rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([step, rank]).integers(0, ROWS, size=12))


def features(step: int, rank: int) -> dict[str, flexd.Jagged]:
    return {"item": flexd.Jagged(ids(step, rank), torch.tensor([5, 7]))}


def train(
    rank: int, collection: flexd.EmbeddingCollection, loss_of: Callable[[int], torch.Tensor], dense: nn.Module
) -> dict[str, Any]:
    """Train STEPS steps with a migration in the second. Dense gradients are averaged here unless FSDP averages them."""
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        if step == 1:
            keys = np.arange(10)
            collection.engine.inbox.offer(1, Delta(keys, np.zeros(10, np.uint8), np.full(10, 2, np.uint8)))
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        for parameter in dense.parameters():
            if not hasattr(parameter, "device_mesh"):
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        collection.optimizer.step()
        losses.append(float(loss.detach()))
    assert collection.placement_version == 1
    return {
        "losses": losses, "table": collection.gather_table("item"), "equal": collection.replicas_bit_equal(),
        "steps": collection.steps, "pending": len(collection.engine.passes),
    }  # fmt: skip


def plain(rank: int, layout: RankLayout, dtype: str = "float64") -> dict[str, Any]:
    """Return the results of training without other parts of PyTorch."""
    collection, tower = collection_of(layout, dtype), Tower(getattr(torch, dtype))
    return train(rank, collection, lambda step: tower(collection(features(step, rank))["item"].values), tower)
