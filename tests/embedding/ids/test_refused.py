"""Uses of tables of unbounded ids that are refused by name, and those of ids that are no such."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError

USERS = flexd.EmbeddingTable("users", 10, 4, ids="unbounded")


def collection(**more: object) -> flexd.EmbeddingCollection:
    tables = [USERS, flexd.EmbeddingTable("items", 10, 4)]
    return flexd.EmbeddingCollection(tables, layout=flexd.RankLayout(1, 1), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "use",
    [
        lambda path: flexd.CheckpointSeries(collection(), path),
        lambda _: flexd.ShardedState(collection()),
        lambda _: flexd.Tap(collection()),
        lambda _: collection(full_state_dict=True),
    ],
)
def test_uses_that_would_lose_the_ids_are_refused(use: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(EmbeddingError, match="cannot have tables of unbounded ids: users"):
        use(tmp_path)


@pytest.mark.parametrize("wrong", [{"ids": "all"}, {"admit_after": 2}, {"ids": "unbounded", "admit_after": 3}])
def test_settings_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(EmbeddingError, match="admit_after"):
        flexd.EmbeddingCollection(
            [flexd.EmbeddingTable("users", 10, 4, **wrong)],  # type: ignore[arg-type]
            layout=flexd.RankLayout(1, 1),
        )


def test_a_state_dict_has_the_ids_and_loads_where_the_table_is_the_same() -> None:
    first, rows = collection(), torch.arange(10)
    lengths = torch.ones(3, dtype=torch.int64)
    first({"users": flexd.Jagged(torch.tensor([-5, 2**62, 7]), lengths)})["users"].values.sum().backward()
    first.optimizer.step()
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
