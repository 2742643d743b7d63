"""``FusedOptimizer``: settings, schedules, rates by table, state, ``step`` like a torch optimizer; joined ones."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flexd
from flexd.core.errors import EmbeddingError
from flexd.embedding.row_optimizers import Adam, RowOptimizer


def collection(optimizer: RowOptimizer) -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 20, 4, dtype="float64")], optimizer=optimizer)


def step(embedding: flexd.EmbeddingCollection, *rows: int) -> None:
    embedding({"item": flexd.Jagged(torch.tensor(rows), torch.tensor([len(rows)]))})[
        "item"
    ].values.sin().sum().backward()
    embedding.optimizer.step()


def test_settings_follow_the_parameter_group() -> None:
    """Schedulers: test_embedding.py."""
    made = collection(Adam(0.1))
    plain = torch.nn.Parameter(made.initial_table("item"))
    dense = torch.optim.Adam([plain], 0.1)
    for number in range(6):
        for optimizer in (made.optimizer, dense):
            optimizer.param_groups[0].update(
                weight_decay=0.1 * number, lr=torch.tensor(0.1 + number, dtype=torch.float64), eps=0.01 * number,
                betas=(0.9 - 0.1 * number, 0.999),
            )  # fmt: skip
        dense.zero_grad()
        plain.sin().sum().backward()
        dense.step()
        step(made, *range(20))
        torch.testing.assert_close(made.gather_table("item"), plain.detach(), rtol=0, atol=1e-7)


def test_the_state_dict_keeps_steps_and_settings() -> None:
    """Bias correction depends on the number of steps: a restored optimizer continues from it."""
    first, second = collection(Adam(0.1)), collection(Adam(0.9))
    for _ in range(3):
        step(first, 1, 2)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert second.steps == 3
    second.load_state_dict(first.state_dict())
    third = collection(Adam(0.1))
    third.load_state_dict(first.state_dict())
    assert third.steps == 3, "the tables' own state has the step too"
    for made in (first, second):
        step(made, 2, 3)
    assert torch.equal(first.gather_table("item"), second.gather_table("item"))
    assert second.steps == 4


def two_tables(**settings: object) -> flexd.EmbeddingCollection:
    tables = [flexd.EmbeddingTable("a", 9, 4), flexd.EmbeddingTable("b", 7, 4, lr=0.5)]
    return flexd.EmbeddingCollection(tables, layout=flexd.RankLayout(1, 1), **settings)  # type: ignore[arg-type]


def test_groups_name_their_tables_and_schedulers_reach_them() -> None:
    collection = two_tables(optimizer=flexd.Adam(lr=0.1))
    groups = collection.optimizer.param_groups
    assert [(group["tables"], group["lr"]) for group in groups] == [(["a"], 0.1), (["b"], 0.5)]
    schedule = torch.optim.lr_scheduler.LambdaLR(collection.optimizer, [lambda step: 1.0, lambda step: 0.5**step])
    collection({"a": torch.tensor([1]), "b": torch.tensor([1])})["b"].values.sum().backward()
    collection.optimizer.step()
    schedule.step()
    assert [group["lr"] for group in groups] == [0.1, 0.25]
    saved = collection.optimizer.state_dict()
    other = two_tables(optimizer=flexd.Adam(lr=0.1))
    other.optimizer.load_state_dict(saved)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1, 0.25]
    assert other.steps == 1


def test_settings_of_a_read_only_table_are_named_as_unused() -> None:
    def made(**given: Any) -> None:
        frozen = flexd.EmbeddingTable("b", 8, 4, trainable=False, **given)
        flexd.EmbeddingCollection([flexd.EmbeddingTable("a", 8, 4), frozen])

    for given in ({"lr": 0.5}, {"optimizer": Adam(0.1)}):
        with pytest.warns(UserWarning, match=r"tables 'b' have .* read only: .* collection\.unfreeze"):
            made(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made()


def test_other_settings_by_table_are_refused() -> None:
    collection = two_tables(optimizer=flexd.Adam(lr=0.1))
    collection({"b": torch.tensor([1])})["b"].values.sum().backward()
    collection.optimizer.param_groups[1]["weight_decay"] = 0.1
    with pytest.raises(
        EmbeddingError, match=r"tables b: weight_decay=0.1, the first group has 0.0 - tables with one kind"
    ):
        collection.optimizer.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_that_could_not_step_is_refused(copied: Callable[[object], object]) -> None:
    with pytest.raises(EmbeddingError, match=r"copy its state_dict\(\)"):
        copied(collection(Adam(0.1)).optimizer)


def made(*, momentum: float = 0.0) -> tuple[nn.Parameter, flexd.Embedding, flexd.JoinedOptimizer]:
    dense = nn.Parameter(torch.ones(3))
    items = flexd.Embedding(5, 3, optimizer=flexd.SGD(0.5), seed=4)
    return dense, items, flexd.JoinedOptimizer(torch.optim.SGD([dense], lr=0.1, momentum=momentum), items.optimizer)


def test_the_state_of_dense_parameters_follows_a_load() -> None:
    dense, items, optimizer = made(momentum=0.5)
    (dense.sum() + items(torch.tensor(1)).sum()).backward()
    optimizer.step()
    fresh, rows, other = made(momentum=0.5)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[fresh]["momentum_buffer"], optimizer.state[dense]["momentum_buffer"])
    assert rows.collection.steps == 1
    other.param_groups[0]["lr"] = 7.0
    assert other.optimizers[0].param_groups[0]["lr"] == 7.0
    with pytest.raises(EmbeddingError, match="a saved optimizer of 1 parameter groups, this one has 2"):
        other.load_state_dict(optimizer.optimizers[0].state_dict())


@pytest.mark.parametrize("where", ["dense", "rows", "nowhere"])
def test_an_overflow_of_one_part_skips_the_step_of_all(where: str) -> None:
    dense, items, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before, infinite = items.weight.detach().clone(), torch.tensor(float("inf"))
    for step in range(2):
        optimizer.zero_grad()
        factors = [infinite if step == 0 and where == part else torch.tensor(1.0) for part in ("dense", "rows")]
        scaler.scale(dense.sum() * factors[0] + items(torch.tensor([1])).sum() * factors[1]).backward()
        scaler.step(optimizer)
        scaler.update()
    steps = 2 if where == "nowhere" else 1
    torch.testing.assert_close(dense.detach(), torch.full((3,), 1 - 0.1 * steps))
    torch.testing.assert_close(items.weight[1].detach(), before[1] - 0.5 * steps)
    assert items.collection.steps == steps


def test_what_cannot_be_joined_is_refused() -> None:
    dense, items, _ = made()
    for optimizers in ((), (items.optimizer, items.optimizer), [torch.optim.SGD([dense], 0.1) for _ in range(2)]):
        with pytest.raises(EmbeddingError, match="JoinedOptimizer of"):
            flexd.JoinedOptimizer(*optimizers)
