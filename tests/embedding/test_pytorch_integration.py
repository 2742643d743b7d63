"""A collection among other parts of PyTorch: DDP, FSDP2, checkpointing, compile, whole models."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import flexd
from flexd.core.placement import Delta, RankLayout
from tests.support.rank_pool import Ranks

ROWS, DIM, STEPS = 40, 8, 4
TWO = RankLayout(2, 1)


class Tower(nn.Module):
    """Two dense layers: from rows [n, DIM] to a loss."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second = nn.Linear(DIM, 6, dtype=torch.float64), nn.Linear(6, 2, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows).tanh()).square().sum()


class Model(nn.Module):
    """A model with the tables inside."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        table = flexd.EmbeddingTable("item", ROWS, DIM, dtype="float64", init_scale=0.5)
        self.items = flexd.EmbeddingCollection(
            [table], optimizer=flexd.SGD(0.01), layout=TWO, replica_slots=[20], seed=seed
        )
        self.tower = Tower()

    def forward(self, features: dict[str, flexd.Jagged]) -> torch.Tensor:
        return self.tower(self.items(features)["item"].values)


def features(step: int, rank: int) -> dict[str, flexd.Jagged]:
    ids = torch.from_numpy(np.random.default_rng([step, rank]).integers(0, ROWS, size=12))
    return {"item": flexd.Jagged(ids, torch.tensor([5, 7]))}


def wrapped(way: str, model: Model, part: nn.Module) -> Callable[[Any], torch.Tensor]:
    """Return the model, or its dense part, in a part of PyTorch."""
    if way == "ddp":
        return DistributedDataParallel(part)
    if way == "fsdp2":
        mesh = init_device_mesh("cpu", (TWO.world_size,))
        fully_shard(model.tower.first, mesh=mesh)
        fully_shard(part, mesh=mesh)
    if way == "compile":  # the collection is a graph break, the dense part has none
        torch._dynamo.reset()
        return torch.compile(part, backend="aot_eager", fullgraph=part is model.tower)  # type: ignore[no-any-return]
    if "checkpoint" in way:
        # Reentrant checkpoints need an input with a gradient.
        anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)

        def again(anchor: torch.Tensor, given: Any) -> torch.Tensor:
            return part(given) + 0 * anchor

        return lambda given: checkpoint(again, anchor, given, use_reentrant=way.startswith("reentrant"))
    return part


def trained(rank: int, way: str, inside: bool) -> dict[str, Any]:
    """Train with a migration in the second step. Dense gradients are averaged here unless FSDP averages them.

    Args:
        inside: the tables are part of what is wrapped.
    """
    model = Model()
    collection = model.items
    forward = wrapped(way, model, model if inside else model.tower)
    optimizer = torch.optim.SGD(model.tower.parameters(), lr=0.01)
    batches: Any = [features(step, rank) for step in range(STEPS)]
    losses = []
    # Beside DDP two threads have collectives under way at the same time.
    for step, given in enumerate(flexd.prefetch(batches, collection) if way == "ddp" else batches):
        if step == 1:
            collection.engine.inbox.offer(1, Delta(np.arange(10), np.zeros(10, np.uint8), np.full(10, 2, np.uint8)))
        optimizer.zero_grad()
        loss = forward(given if inside else collection(given)["item"].values)
        loss.backward()
        for parameter in model.tower.parameters():
            if not hasattr(parameter, "device_mesh"):
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        collection.optimizer.step()
        losses.append(float(loss.detach()))
    assert collection.placement_version == 1
    assert collection.replicas_bit_equal()
    assert (collection.steps, len(collection.engine.passes)) == (STEPS, 0)
    return {"losses": losses, "table": collection.gather_table("item")}


def whole_model_state(rank: int) -> dict[str, Any]:
    """Save a model during training, load it into another one and train both on."""

    def train_from(model: Model, first: int, last: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(first, last):
            optimizer.zero_grad()
            model(features(step, rank)).backward()
            optimizer.step()
            model.items.optimizer.step()

    first, second = Model(), Model(seed=5)
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


@pytest.fixture(scope="module")
def expected(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks(2).run(trained, "plain", False)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "compile", "checkpoint", "reentrant checkpoint"])
def test_training_is_that_of_the_parts_alone(
    ranks: Ranks, expected: list[dict[str, Any]], way: str, inside: bool
) -> None:
    for got, reference in zip(ranks(2).run(trained, way, inside), expected, strict=True):
        np.testing.assert_allclose(got["losses"], reference["losses"], rtol=0, atol=1e-9)
        torch.testing.assert_close(got["table"], reference["table"], rtol=0, atol=1e-9)


def test_the_state_dict_of_a_whole_model(ranks: Ranks) -> None:
    for result in ranks(2).run(whole_model_state):
        assert result["loaded"] == "<All keys matched successfully>"
        assert result["parameters"] == [f"tower.{part}" for part in (
            "first.weight", "first.bias", "second.weight", "second.bias"
        )]  # fmt: skip
        assert result["buffers"] == []
        assert any(key.startswith("items.") for key in result["keys"])
        for first, second in (result["tables"], result["dense"]):
            assert torch.equal(first, second)
