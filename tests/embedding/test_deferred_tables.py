"""Collections that are constructed on ``meta`` and get their tables from ``to_empty``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from tests.support import pytorch_jobs
from tests.support.pytorch_jobs import Model, Tower, collection_of, features, train
from tests.support.rank_pool import RankPool


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


Ranks = Callable[[int], RankPool]

TABLE = flexd.EmbeddingTable("item", 10, 4)
IDS = {"item": flexd.Jagged(torch.tensor([1, 7]), torch.tensor([2]))}


def on_meta(**more: Any) -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection([TABLE], layout=RankLayout(1, 1), device="meta", **more)


def test_ranks_train_equally_from_meta(ranks: Ranks) -> None:
    layout = RankLayout(2, 1)
    plain = ranks(2).run(pytorch_jobs.plain, layout)
    for got, expected in zip(ranks(2).run(from_meta, layout), plain, strict=True):
        assert got["on_meta"] == "meta"
        assert got["initial"] == [True, True, True]
        assert got["reset steps"] == 0
        assert got["losses"] == expected["losses"]
        assert torch.equal(got["table"], expected["table"])
        assert got["equal"]


@pytest.mark.parametrize(
    "use",
    [
        lambda collection: collection(IDS),
        lambda collection: collection.optimizer,
        lambda collection: collection.state_dict(),
        lambda collection: collection.load_state_dict({}),
        lambda collection: collection.gather_table("item"),
        lambda collection: collection.exchange,
        lambda collection: flexd.Tap(collection),
        lambda collection: flexd.connect(collection, "127.0.0.1:1", job="j", attempt="1"),
        lambda collection: next(iter(flexd.prefetch([IDS], collection))),
    ],
)
def test_use_before_to_empty_is_refused(use: Callable[[flexd.EmbeddingCollection], object]) -> None:
    with pytest.raises(EmbeddingError, match=r"on meta, without values - call to_empty\(device=\.\.\.\) on every rank"):
        use(on_meta())


def test_tables_are_made_once_with_their_values_also_inside_a_meta_context() -> None:
    collection = on_meta(optimizer=flexd.Adagrad(initial_accumulator_value=0.5))
    with torch.device("meta"):
        collection.to_empty(device="cpu")
    assert torch.equal(collection.gather_table("item"), collection.initial_table("item"))
    assert bool((collection.engine.stores[0].state == 0.5).all())
    collection(IDS)["item"].values.sum().backward()
    collection.optimizer.step()
    trained = collection.gather_table("item")
    assert not torch.equal(trained, collection.initial_table("item"))
    collection.to_empty(device="cpu")
    assert torch.equal(collection.gather_table("item"), trained), "tables that exist keep their rows"
    with pytest.raises(EmbeddingError, match="are on cpu and cannot be moved to meta"):
        collection.to_empty(device="meta")
