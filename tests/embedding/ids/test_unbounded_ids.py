"""Unbounded ids on one rank: uses that are refused by name, frozen tables, state. Training: ``test_any_training``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexd
from flexd.core.errors import EmbeddingError

USERS = flexd.EmbeddingTable("users", 10, 4, ids="unbounded")


def collection(**more: Any) -> flexd.EmbeddingCollection:
    tables = [USERS, flexd.EmbeddingTable("items", 10, 4)]
    return flexd.EmbeddingCollection(tables, layout=flexd.RankLayout(1, 1), **more)


def train(embedding: flexd.EmbeddingCollection, *ids: int) -> None:
    embedding({"users": torch.tensor(ids)})["users"].values.sum().backward()
    embedding.optimizer.step()


@pytest.mark.parametrize(
    "use",
    [
        lambda: flexd.ShardedState(collection()),
        lambda: flexd.Tap(collection()),
        lambda: collection(full_state_dict=True),
    ],
)
def test_uses_that_would_lose_the_ids_are_refused(use: Callable[[], object]) -> None:
    with pytest.raises(EmbeddingError, match="cannot have tables of unbounded ids: users"):
        use()


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": "all"}, {"admit_after": 2}, {"ids": "unbounded", "admit_after": 3}, {"ids": "unbounded", "rows": 1},
    ],
)  # fmt: skip
def test_settings_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EmbeddingError, match="admit_after"):
        flexd.EmbeddingTable(**{"name": "users", "rows": 10, "dim": 4} | wrong)


def test_ids_get_and_lose_rows_by_training_alone() -> None:
    made = collection()
    train(made, 5)
    made.freeze("users")
    before = made.gather_table("users")
    for is_evaluation in (False, True):
        with torch.set_grad_enabled(not is_evaluation):
            found = made({"users": torch.tensor([5, 6])})["users"].values
        assert torch.equal(found, before[[0, 9]]), "6 reads the last row"
    assert made.rows_of("users", torch.tensor([5, 6])).tolist() == [0, -1]
    made.unfreeze("users")
    train(made, 6)
    assert made.rows_of("users", torch.tensor([5, 6])).tolist() == [0, 1]
    made.reset_parameters()
    assert made.rows_of("users", torch.tensor([5, 6])).tolist() == [-1, -1]


def test_a_look_up_that_a_backward_pass_repeats_counts_once() -> None:
    plain, repeating = collection(), collection()
    for ids in ([5, 6], [6, -1], [5, 8]):
        for made in (plain, repeating):

            def looked_up(made: flexd.EmbeddingCollection = made, ids: list[int] = ids) -> torch.Tensor:
                return made({"users": torch.tensor(ids)})["users"].values.cos()

            rows = looked_up() if made is plain else checkpoint(looked_up, use_reentrant=False)
            rows.square().sum().backward()
            made.optimizer.step()
    assert torch.equal(plain.gather_table("users"), repeating.gather_table("users"))
    for name, column in plain.engine.ids.state().items():
        assert torch.equal(column, repeating.engine.ids.state()[name]), name


def test_a_state_dict_has_the_ids_and_loads_where_the_table_is_the_same() -> None:
    first, rows = collection(), torch.arange(10)
    train(first, -5, 2**62, 7)
    state, second = first.state_dict(), collection()
    second.load_state_dict(state)
    for one, other in zip(first.ids_of("users", rows), second.ids_of("users", rows), strict=True):
        assert torch.equal(one, other)
    assert (
        first.rows_of("users", torch.tensor([7, 8])).tolist() == second.rows_of("users", torch.tensor([7, 8])).tolist()
    )
    assert sorted(first.rows_of("users", torch.tensor([-5, 2**62, 7])).tolist()) == [0, 1, 2]
    del state["rank0.ids.uses"]
    with pytest.raises(RuntimeError, match=r"ids\.uses"):
        second.load_state_dict(state)
    with pytest.raises(EmbeddingError, match="are its rows"):
        first.rows_of("items", rows)
