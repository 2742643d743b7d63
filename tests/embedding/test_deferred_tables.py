"""Collections that are constructed on ``meta`` and get their tables from ``to_empty``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from tests.support.pytorch_jobs import Model, collection_of, features

TABLE = flexd.EmbeddingTable("item", 10, 4)
IDS = {"item": flexd.Jagged(torch.tensor([1, 7]), torch.tensor([2]))}


def on_meta(**more: Any) -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection([TABLE], layout=RankLayout(1, 1), device="meta", **more)


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


def test_a_model_that_was_constructed_on_meta_gets_its_tables() -> None:
    """FSDP2's users make the parameters of a whole model in this way."""
    with torch.device("meta"):
        model = Model(collection_of(RankLayout(1, 1)))
    assert str(model.items.device) == "meta"
    model.to_empty(device="cpu")
    assert torch.equal(model.items.gather_table("item"), model.items.initial_table("item"))
    model.items(features(0, 0))["item"].values.sum().backward()
    model.items.optimizer.step()
    model.items.reset_parameters()
    assert torch.equal(model.items.gather_table("item"), model.items.initial_table("item"))
    assert model.items.steps == 0
