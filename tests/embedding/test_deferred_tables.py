"""Collections that are constructed on ``meta`` and get their tables from ``to_empty``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import flexd
from flexd.core.errors import EmbeddingError, TopologyError
from flexd.core.layout import RankLayout
from flexd.embedding.deferred_tables import DeferredTables
from flexd.embedding.devices import allocated_device
from flexd.embedding.exchange.process_groups import ChainGroups
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]

TABLE = flexd.EmbeddingTable("item", 10, 4)
IDS = {"item": flexd.Jagged(torch.tensor([1, 7]), torch.tensor([2]))}


def on_meta(**more: Any) -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection([TABLE], layout=RankLayout(1, 1), device="meta", **more)


def test_ranks_train_equally_from_meta(ranks: Ranks) -> None:
    layout = RankLayout(2, 1)
    plain = ranks(2).run("pytorch_jobs:plain", layout)
    for got, expected in zip(ranks(2).run("pytorch_jobs:from_meta", layout), plain, strict=True):
        assert got["on_meta"] == "meta"
        assert got["initial"] == [True, True, True]
        assert got["reset steps"] == 0
        assert got["losses"] == expected["losses"]
        assert torch.equal(got["table"], expected["table"])
        assert got["equal"]


def test_nothing_is_made_on_meta() -> None:
    """A table of 4 TB; no process group is needed either."""
    with mock.patch.object(ChainGroups, "__init__", side_effect=AssertionError), torch.device("meta"):
        collection = flexd.EmbeddingBagCollection([flexd.EmbeddingTable("item", 10**10, 100)])
    assert collection.device == torch.device("meta")
    assert collection.tables[0].rows == 10**10
    collection.reset_parameters()
    collection.half()
    with collection:
        pass
    collection.close()


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


def test_to_is_refused_on_meta_with_the_remedy() -> None:
    with pytest.raises(EmbeddingError, match=r"call to_empty\(device=\.\.\.\) instead of to\(device\)"):
        on_meta().to("cpu")


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


def test_a_refused_to_empty_leaves_the_collection_on_meta() -> None:
    collection = flexd.EmbeddingCollection([TABLE], layout=RankLayout(2, 1), device="meta")
    for _ in range(2):
        with pytest.raises(TopologyError, match="layout of 2 nodes"):
            collection.to_empty(device="cpu")
        assert collection.device == torch.device("meta")
        assert not collection.has_tables


def test_skip_init_makes_a_collection() -> None:
    made = nn.utils.skip_init(flexd.EmbeddingCollection, [TABLE], layout=RankLayout(1, 1), device="cpu")
    assert torch.equal(made.gather_table("item"), made.initial_table("item"))


def test_a_device_without_an_index_is_the_device_of_its_tensors() -> None:
    """``FakeTensorMode`` has CUDA tensors without a GPU, but no ``to("cuda")``: ``to_empty`` takes its place."""
    with FakeTensorMode():
        assert allocated_device("cuda") == torch.device("cuda:0")
        module = DeferredTables("cuda").to_empty(device="cuda").to_empty(device="cuda:0").half()
        assert module.device == torch.device("cuda:0")
        for other in ("cpu", "cuda:1"):
            with pytest.raises(EmbeddingError, match=f"are on cuda:0 and cannot be moved to {other}"):
                module.to_empty(device=other)
