"""``FusedOptimizer``: settings, schedules, state and ``step`` like a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flexd
from flexd.embedding.row_optimizers import Adam, RowOptimizer
from tests.support.plain_tables import close, ids, pair


def collection(optimizer: RowOptimizer) -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 20, 4, dtype="float64")], optimizer=optimizer)


def test_all_settings_are_in_the_parameter_group() -> None:
    made = collection(Adam(0.1, (0.5, 0.6), 0.2, weight_decay=0.3, decoupled_weight_decay=True))
    group = made.optimizer.param_groups[0]
    settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")}
    assert settings == {
        "lr": 0.1, "betas": (0.5, 0.6), "eps": 0.2, "weight_decay": 0.3, "decoupled_weight_decay": True
    }  # fmt: skip


def step(embedding: flexd.EmbeddingCollection, *rows: int) -> None:
    embedding({"item": flexd.Jagged(torch.tensor(rows), torch.tensor([len(rows)]))})[
        "item"
    ].values.sin().sum().backward()
    embedding.optimizer.step()


@pytest.mark.parametrize("kind", ["OneCycleLR", "by hand"])
def test_settings_follow_the_parameter_group(kind: str) -> None:
    """OneCycleLR changes beta1 too."""
    made = collection(Adam(0.1))
    plain = torch.nn.Parameter(made.initial_table("item"))
    dense = torch.optim.Adam([plain], 0.1)
    optimizers = (made.optimizer, dense)
    schedules = (
        [torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=8) for o in optimizers] if kind != "by hand" else []
    )
    for number in range(6):
        if kind == "by hand":
            for optimizer in optimizers:
                optimizer.param_groups[0].update(
                    weight_decay=0.1 * number, lr=torch.tensor(0.1 + number, dtype=torch.float64), eps=0.01 * number
                )
        dense.zero_grad()
        plain.sin().sum().backward()
        dense.step()
        step(made, *range(20))
        for schedule in schedules:
            schedule.step()
        torch.testing.assert_close(made.gather_table("item"), plain.detach(), rtol=0, atol=1e-7)
    assert made.optimizer.param_groups[0]["betas"] == dense.param_groups[0]["betas"]


def test_the_state_dict_keeps_steps_and_settings() -> None:
    """Bias correction depends on the number of steps: a restored optimizer continues from it."""
    first, second = collection(Adam(0.1)), collection(Adam(0.9))
    for _ in range(3):
        step(first, 1, 2)
    saved = first.optimizer.state_dict()
    second.optimizer.load_state_dict(saved)
    assert second.steps == 3
    second.load_state_dict(first.state_dict())
    third = collection(Adam(0.1))
    third.load_state_dict(first.state_dict())
    assert third.steps == 3, "the tables' own state has the step too"
    for made in (first, second):
        step(made, 2, 3)
    assert torch.equal(first.gather_table("item"), second.gather_table("item"))
    assert second.steps == 4


SCHEDULERS: list[Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
]


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_learning_rate_schedulers_change_the_updates(
    schedule: Callable[..., torch.optim.lr_scheduler.LRScheduler],
) -> None:
    collection, plain = pair()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    ours, theirs = schedule(collection.optimizer), schedule(optimizer)
    for step in range(6):
        rows = (step, step + 1, step, 19)
        optimizer.zero_grad()
        collection(ids(*rows))["item"].values.sin().sum().backward()
        plain(torch.tensor(rows)).sin().sum().backward()
        collection.optimizer.step()
        optimizer.step()
        ours.step()
        theirs.step()
        assert collection.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert close(collection, plain)


def test_the_optimizer_state_dict_keeps_the_learning_rate() -> None:
    collection, _ = pair()
    collection.optimizer.param_groups[0]["lr"] = 0.07
    other, _ = pair()
    other.optimizer.load_state_dict(collection.optimizer.state_dict())
    before = other.gather_table("item")
    other(ids(3))["item"].values.sum().backward()
    other.optimizer.step()
    assert torch.allclose(before[3] - other.gather_table("item")[3], torch.full((4,), 0.07, dtype=torch.float64))


def test_a_closure_runs_with_gradients() -> None:
    collection, plain = pair()

    def closure() -> torch.Tensor:
        loss = collection(ids(1, 2))["item"].values.sin().sum()
        loss.backward()
        return loss

    expected = plain(torch.tensor([1, 2])).sin().sum()
    assert torch.allclose(collection.optimizer.step(closure), expected)
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.3).step()
    assert close(collection, plain)
