"""A collection among other parts of PyTorch: FSDP2, checkpointing, compile, AMP, nested tensors, whole models."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import flexd
from flexd.core.placement import RankLayout
from tests.support import pytorch_jobs
from tests.support.pytorch_jobs import Model, Tower, collection_of, features, train
from tests.support.rank_pool import RankPool


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


Ranks = Callable[[int], RankPool]


TWO = RankLayout(2, 1)


@pytest.fixture(scope="module")
def expected(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks(2).run(pytorch_jobs.plain, TWO)


def same(results: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-9) -> None:
    for got, reference in zip(results, expected, strict=True):
        losses = [torch.tensor(result["losses"], dtype=torch.float64) for result in (got, reference)]
        torch.testing.assert_close(*losses, rtol=0, atol=tolerance)
        torch.testing.assert_close(got["table"], reference["table"], rtol=0, atol=tolerance)
        assert got["equal"]
        assert got["steps"] == reference["steps"]
        assert got["pending"] == 0


@pytest.mark.parametrize("inside", [False, True])
def test_the_dense_part_may_be_in_fsdp2(ranks: Ranks, expected: list[dict[str, Any]], inside: bool) -> None:
    same(ranks(2).run(fsdp, TWO, inside), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around_all", [False, True])
def test_activation_checkpointing(
    ranks: Ranks, expected: list[dict[str, Any]], reentrant: bool, around_all: bool
) -> None:
    same(ranks(2).run(checkpointed, TWO, reentrant, around_all), expected)


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_trains_equally(ranks: Ranks, expected: list[dict[str, Any]], whole: bool) -> None:
    same(ranks(2).run(compiled, TWO, whole), expected)


def test_the_state_dict_of_a_whole_model(ranks: Ranks) -> None:
    for result in ranks(2).run(whole_model_state, TWO):
        assert result["loaded"] == "<All keys matched successfully>"
        assert result["parameters"] == [
            "tower.first.weight",
            "tower.first.bias",
            "tower.second.weight",
            "tower.second.bias",
        ]
        assert result["buffers"] == []
        assert any(key.startswith("items.") for key in result["keys"])
        for first, second in (result["tables"], result["dense"]):
            assert torch.equal(first, second)
