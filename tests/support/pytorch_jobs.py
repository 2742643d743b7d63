"""Jobs of ranks: training with a collection among other parts of PyTorch."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import flexd
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta

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


def fsdp(rank: int, layout: RankLayout, inside: bool) -> dict[str, Any]:
    collection, tower = collection_of(layout), Tower()
    mesh = init_device_mesh("cpu", (layout.world_size,))
    model = Model(collection, tower)
    fully_shard(tower.first, mesh=mesh)
    fully_shard(model if inside else tower, mesh=mesh)
    if inside:
        return train(rank, collection, lambda step: model(features(step, rank)), model)
    return train(rank, collection, lambda step: tower(collection(features(step, rank))["item"].values), tower)


def checkpointed(rank: int, layout: RankLayout, reentrant: bool, around_all: bool) -> dict[str, Any]:
    collection, tower = collection_of(layout), Tower()
    model = Model(collection, tower)
    grad = torch.zeros(
        (), dtype=torch.float64, requires_grad=True
    )  # reentrant checkpoints need an input with a gradient

    def whole_model(anchor: torch.Tensor, inputs: dict[str, flexd.Jagged]) -> torch.Tensor:
        return model(inputs) + 0 * anchor

    def loss_of(step: int) -> torch.Tensor:
        inputs = features(step, rank)
        if around_all:
            out = checkpoint(whole_model, grad, inputs, use_reentrant=reentrant)
        else:
            out = checkpoint(tower, collection(inputs)["item"].values, use_reentrant=reentrant)
        assert isinstance(out, torch.Tensor)
        return out

    return train(rank, collection, loss_of, tower)


def compiled(rank: int, layout: RankLayout, whole: bool) -> dict[str, Any]:
    """Compile the dense part without graph breaks, or the whole model, with the collection as a graph break."""
    torch._dynamo.reset()
    collection, tower = collection_of(layout), Tower()
    if whole:
        model = torch.compile(Model(collection, tower), backend="aot_eager")
        return train(rank, collection, lambda step: model(features(step, rank)), tower)
    dense = torch.compile(tower, backend="aot_eager", fullgraph=True)
    return train(rank, collection, lambda step: dense(collection(features(step, rank))["item"].values), tower)


def whole_model_state(rank: int, layout: RankLayout) -> dict[str, Any]:
    """Save a model during training, load it into another one and train both on."""

    def train_from(model: Model, first: int, last: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(first, last):
            optimizer.zero_grad()
            model(features(step, rank)).backward()
            optimizer.step()
            model.items.optimizer.step()

    first, second = Model(collection_of(layout)), Model(collection_of(layout, seed=5))
    train_from(first, 0, 2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    loaded = second.load_state_dict(torch.load(file, weights_only=True))
    train_from(first, 2, 4)
    train_from(second, 2, 4)
    return {
        "loaded": str(loaded), "parameters": [name for name, _ in first.named_parameters()],
        "buffers": [name for name, _ in first.named_buffers()], "keys": sorted(first.state_dict()),
        "tables": (first.items.gather_table("item"), second.items.gather_table("item")),
        "dense": (first.tower.first.weight.detach(), second.tower.first.weight.detach()),
    }  # fmt: skip


def from_meta(rank: int, layout: RankLayout) -> dict[str, Any]:
    """Train a model that was constructed on meta; FSDP2's users make its parameters in this way."""
    with torch.device("meta"):
        model = Model(collection_of(layout))
    collection = model.items
    on_meta = str(collection.device)
    model.to_empty(device="cpu")
    model.tower = Tower()
    made = collection.gather_table("item")
    collection.reset_parameters()
    again = collection.gather_table("item")
    trained = train(rank, collection, lambda step: model(features(step, rank)), model)
    initial = collection.initial_table("item")
    collection.reset_parameters()
    reset = collection.gather_table("item")
    equal = [torch.equal(table, initial) for table in (made, again, reset)]
    return {**trained, "on_meta": on_meta, "initial": equal, "reset steps": collection.steps}
