"""Unbounded ids on one rank: uses that are refused by name, frozen tables, state. Training: ``test_any_training``."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexd
from flexd.core.errors import EmbeddingError
from flexd.stream.ids import make_hash

USERS = flexd.EmbeddingTable("users", 10, 4, ids="unbounded")


def collection(**more: Any) -> flexd.EmbeddingCollection:
    tables = [USERS, flexd.EmbeddingTable("items", 10, 4)]
    return flexd.EmbeddingCollection(tables, layout=flexd.RankLayout(1, 1), **more)


def train(embedding: flexd.EmbeddingCollection, *ids: int) -> None:
    embedding({"users": torch.tensor(ids)})["users"].values.sum().backward()
    embedding.optimizer.step()


@pytest.mark.parametrize("pooling_at", ["", "requester", "owner"])
def test_a_tap_counts_the_rows_of_ids_and_shared_rows_once_more_where_ids_are_admitted(pooling_at: str) -> None:
    more = {"ids": "unbounded", "features": ("viewer", "author")}
    layout = flexd.RankLayout(1, 1)
    if pooling_at:
        more |= {"pooling": "sum", "pooling_at": pooling_at}
        items = flexd.EmbeddingBagTable("items", 10, 4, pooling="sum")
        made: Any = flexd.EmbeddingBagCollection(
            [flexd.EmbeddingBagTable("users", 70, 4, **more), items], layout=layout
        )
    else:
        items = flexd.EmbeddingTable("items", 10, 4)
        made = flexd.EmbeddingCollection([flexd.EmbeddingTable("users", 70, 4, **more), items], layout=layout)
    tap = flexd.Tap(made, interval_seconds=1e9)
    ids = {"viewer": [-5, 2**60, -5], "items": [4, 2], "author": [7, 2**60]}
    given = {name: flexd.Jagged(torch.tensor(values), torch.tensor([len(values)])) for name, values in ids.items()}
    for admitted in (True, False):
        found = made(given)
        values = [part if isinstance(part, torch.Tensor) else part.values for part in found.values()]
        torch.stack([part.sum() for part in values]).sum().backward()
        made.optimizer.step()
        users, of_items = ({int(row): int(n) for row, n in zip(one.rows, one.counts, strict=True)}
                           for one in tap._counting.rows.drain())  # fmt: skip
        rows = torch.cat([made.rows_of("users", given[name].values) for name in ("viewer", "author")])
        shared = {69: 1} if admitted else {}
        assert users == dict(Counter(rows.tolist())) | shared
        assert of_items == {2: 1, 4: 1}


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


def test_whole_tables_without_ids_leave_none_with_a_row() -> None:
    first, second = collection(full_state_dict=True), collection(full_state_dict=True)
    train(first, 5, 6)
    for _ in range(3):
        train(second, 7)
    state = {key: value for key, value in first.state_dict().items() if not key.startswith("ids.")}
    with pytest.raises(RuntimeError, match=r"ids\.users\.progress"):
        second.load_state_dict(state)
    second.load_state_dict(state, strict=False)
    assert second.rows_of("users", torch.tensor([5, 6, 7])).tolist() == [-1] * 3
    train(second, 8)
    assert second.rows_of("users", torch.tensor([8])).tolist() == [0]


def test_text_has_the_ids_that_the_stream_counts() -> None:
    texts = ["a", "Zürich", "", "a"]
    ids = flexd.hash_ids(texts)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [make_hash()(text) for text in texts]
    assert ids[0] == ids[3] != ids[1]


def test_one_embedding_and_those_of_a_model_take_any_ids() -> None:
    ids = torch.tensor([[2**61, -7], [3, 2**61]])
    model = torch.nn.ModuleDict({"users": torch.nn.Embedding(70, 4), "shop": torch.nn.Embedding(9, 4)})
    with pytest.raises(EmbeddingError, match="unbounded names shops"):
        flexd.embed_all(model, unbounded={"shops": 1})
    tables = flexd.embed_all(model, unbounded={"users": 2})
    alone = flexd.Embedding(70, 4, ids="unbounded", name="alone")
    for made, collection, has_rows in (
        (model["users"], tables, [True, False, False]),
        (alone, alone.collection, [True] * 3),
    ):
        rows = made(ids)
        assert rows.shape == (2, 2, 4)
        rows.sum().backward()
        made.optimizer.step()
        found = collection.rows_of(made.name, torch.tensor([2**61, -7, 3]))
        assert (found >= 0).tolist() == has_rows, "after two look-ups, or after one"
        with pytest.raises(EmbeddingError, match="unbounded ids have its rows"):
            _ = made.weight
        with torch.no_grad():
            assert torch.equal(made(ids)[1, 1], made.weight[found[0]])
    with pytest.raises(EmbeddingError, match="padding_idx=0 of unbounded ids"):
        flexd.Embedding(70, 4, 0, ids="unbounded")
    with pytest.raises(EmbeddingError, match="shop has padding_idx and unbounded ids"):
        flexd.embed_all(torch.nn.ModuleDict({"shop": torch.nn.Embedding(9, 4, 0)}), unbounded={"shop": 1})


def trained(tables: int) -> tuple[list[float], list[torch.Tensor]]:
    embedding = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable(f"t{n}", 200 + n, 4, ids="unbounded", admit_after=1 + n % 2) for n in range(tables)],
        optimizer=flexd.RowWiseAdagrad(),
        seed=1,
    )
    draw, losses = torch.Generator().manual_seed(0), []
    for step in range(20):
        count = 0 if step == 7 else 150
        popular = torch.rand(tables, count, generator=draw).pow(-1.2).long() % 1000 * 7919 - 99
        found = embedding({f"t{n}": popular[n] for n in range(tables)})
        loss = torch.stack([one.values.square().sum() + one.values.sum() for one in found.values()]).sum()
        if count:
            loss.backward()
        embedding.optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [embedding.gather_table(f"t{n}") for n in range(tables)]


@pytest.mark.parametrize("tables", [1, 3])
def test_what_an_accelerator_does_without_waiting_decides_the_same(
    tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, rows = trained(tables)
    assert len({*losses}) > 10
    monkeypatch.setattr("flexd.embedding.devices.in_host_memory", lambda _: False)
    again = trained(tables)
    assert losses == again[0]
    assert all(map(torch.equal, rows, again[1]))
