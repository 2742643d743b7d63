"""Pooled features: exact against ``nn.EmbeddingBag``, with migrations, weights, empty bags and invalid input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from tests.support.bag_jobs import ROWS, Answers, batch, tables, train_alone
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
SUMS = ("sums", "sums")


@pytest.mark.parametrize(
    ("nodes", "local_ranks", "exchange", "ahead", "answers"),
    [
        (1, 1, "chain", False, ROWS),
        (2, 1, "chain", False, ROWS),
        (2, 1, "chain", True, ROWS),
        (2, 2, "chain", True, ROWS),
        (2, 2, "direct", False, ROWS),
        (1, 2, "direct_no_dedup", False, ROWS),
        (1, 1, "chain", False, SUMS),
        (2, 1, "chain", True, SUMS),
        (2, 2, "chain", False, SUMS),
        (2, 2, "chain", True, ("sums", "rows")),
        (3, 2, "chain", False, ("rows", "sums")),
        (2, 2, "direct", True, SUMS),
        (1, 2, "direct_no_dedup", False, SUMS),
    ],
)
def test_training_equals_embedding_bags(
    ranks: Ranks, nodes: int, local_ranks: int, exchange: str, ahead: bool, answers: Answers
) -> None:
    layout = RankLayout(nodes, local_ranks)
    losses, weight_grads, expected = train_alone(layout.world_size)
    job = ("bag_jobs:train", layout, exchange, ahead, 0, answers)
    for rank, result in enumerate(ranks(layout.world_size).run(*job)):
        assert result["version"] == 1, "the migration must happen"
        assert result["equal"]
        np.testing.assert_allclose(result["losses"], losses[rank], rtol=0, atol=1e-9)
        for got, reference in zip(result["weight_grads"], weight_grads[rank], strict=True):
            for name, grad in reference.items():
                if grad is None:
                    assert got[name] is None
                else:
                    torch.testing.assert_close(got[name], grad, rtol=0, atol=1e-9)
        for name, table in expected.items():
            torch.testing.assert_close(result["tables"][name], table, rtol=0, atol=1e-9)
    of_history = [grads.get("history") for grads in weight_grads[0] if "history" in grads]
    assert any(grad is not None for grad in of_history), "some weights must have gradients"
    assert any(grad is None for grad in of_history), "some weights must have none"


def test_sums_that_travel_narrow_are_rounded_alike_at_every_placement(ranks: Ranks) -> None:
    layout = RankLayout(2, 2)
    with_copies, without = (ranks(4).run("bag_jobs:train_narrow", layout, copies) for copies in (True, False))
    for one, other in zip(with_copies, without, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("answers", [ROWS, SUMS])
@pytest.mark.parametrize("faulty", [0, 1])
def test_invalid_bags_are_refused_on_every_rank(ranks: Ranks, faulty: int, answers: Answers) -> None:
    causes = [
        "lengths from 2 on sum to 4, for 3 ids", "lengths from -1 on", "lengths from 1 on sum to 1, for 3 ids",
        "lengths from 5 on sum to 5, for 0 ids", "lengths from 0 on sum to 0, for 3 ids", "row 63 of table",
        "pooled by mean", "for ids of shape (3,)", "torch.int64 on cpu", "the feature is not in the batch",
    ]  # fmt: skip
    for rank, errors in enumerate(ranks(2).run("bag_jobs:refused", RankLayout(2, 1), faulty, answers)):
        for text, cause in zip(errors, causes, strict=True):
            assert (cause if rank == faulty else f"rank {faulty} has input") in text


def test_all_types_of_input_pool_equally() -> None:
    collection = flexd.EmbeddingBagCollection(tables())
    ids, lengths = torch.tensor([1, 5, 5, 9]), torch.tensor([3, 0, 1])
    jagged = flexd.Jagged(ids, lengths)
    nested = torch.nested.nested_tensor([ids[:3], ids[:0], ids[3:]], layout=torch.jagged)
    with torch.no_grad():
        forms = [collection({"shop": form})["shop"] for form in (jagged, nested, (ids, jagged.offsets))]
        plain = nn.functional.embedding_bag(
            ids, collection.initial_table("shop"), jagged.offsets, mode="mean", include_last_offset=True
        )
    for pooled in forms:
        torch.testing.assert_close(pooled, plain)


@pytest.mark.parametrize("answers", [ROWS, SUMS])
def test_empty_batches_and_bags_pool_to_zero(answers: Answers) -> None:
    collection = flexd.EmbeddingBagCollection(tables(answers))
    none = torch.arange(0)
    out = collection({"history": flexd.Jagged(none, none), "shop": flexd.Jagged(none, torch.tensor([0, 0]))})
    assert out["history"].shape == (0, 8)
    assert torch.equal(out["shop"], torch.zeros(2, 5, dtype=torch.float64))
    out["shop"].sum().backward()
    collection.optimizer.step()
    assert collection({}) == {}


@pytest.mark.parametrize("answers", [ROWS, SUMS])
def test_dropped_gradients_change_nothing_and_several_backward_passes_add_up(answers: Answers) -> None:
    collection = flexd.EmbeddingBagCollection(tables(answers), optimizer=flexd.SGD(0.5))
    bags = {"history": flexd.Jagged(torch.tensor([3, 3, 7]), torch.tensor([2, 1]))}
    collection(bags)["history"].sum().backward()
    collection.optimizer.zero_grad()
    collection.optimizer.step()
    assert torch.equal(collection.gather_table("item"), collection.initial_table("item"))
    loss = collection(bags)["history"].sum()
    loss.backward(retain_graph=True)
    loss.backward()
    collection.optimizer.step()
    moved = collection.initial_table("item") - collection.gather_table("item")
    torch.testing.assert_close(moved[[3, 7, 8], 0], torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("answer", ["rows", "sums"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_half_precision_bags(dtype: str, answer: str) -> None:
    collection = flexd.EmbeddingBagCollection([flexd.EmbeddingBagTable("item", 20, 4, dtype=dtype, answer=answer)])
    ids, lengths = torch.tensor([3, 3, 7]), torch.tensor([2, 1])
    out = collection({"item": flexd.Jagged(ids, lengths)})["item"]
    assert out.dtype == getattr(torch, dtype)
    table = collection.initial_table("item").float()
    torch.testing.assert_close(out.float(), torch.stack([2 * table[3], table[7]]), rtol=1e-2, atol=1e-2)
    out.float().sum().backward()
    collection.optimizer.step()
    moved = table - collection.gather_table("item").float()
    assert (moved[3] > 1.5 * moved[7]).all()


def test_a_plain_table_is_summed_and_an_unknown_pooling_refused() -> None:
    features, _ = batch(1, 0)
    plain = [flexd.EmbeddingTable("item", 61, 8, ("history", "basket"), "float64", init_scale=0.5)]
    inputs = {name: ids for name, ids in features.items() if name != "shop"}
    with torch.no_grad():
        ours = flexd.EmbeddingBagCollection(plain)(inputs)
        bags = flexd.EmbeddingBagCollection(tables())(inputs)
    for name, pooled in bags.items():
        assert torch.equal(ours[name], pooled)
    with pytest.raises(EmbeddingError, match="pooling 'max'"):
        flexd.EmbeddingBagTable("item", 61, 8, pooling="max")
    with pytest.raises(EmbeddingError, match="answer 'row'"):
        flexd.EmbeddingBagTable("item", 61, 8, answer="row")
    with pytest.raises(EmbeddingError, match="answers: item - tables of the type EmbeddingBagTable: there are none"):
        flexd.EmbeddingBagCollection(plain, answers={"item": "sums"})
    summed = flexd.EmbeddingBagCollection(tables(), answers={"item": "sums"})
    assert [table.answer for table in summed.tables] == ["sums", "rows"]
    with torch.no_grad():
        for name, pooled in summed(inputs).items():
            torch.testing.assert_close(ours[name], pooled)


def test_sums_are_refused_where_nothing_is_pooled(ranks: Ranks) -> None:
    tables = [flexd.EmbeddingBagTable("tag", 61, 8, answer="sums"), flexd.EmbeddingTable("item", 61, 8)]
    with pytest.raises(EmbeddingError, match=r"answer by sums in a collection without pooling: tag - make them flexd"):
        flexd.EmbeddingCollection(tables)
    # A rank whose peer alone is wrong is told, and does not wait.
    told = ranks(2).run("bag_jobs:sums_without_pooling", RankLayout(2, 1))
    assert all("ranks [1] have other" in text for text in told)
    pooled = flexd.EmbeddingBagCollection(tables[:1])
    plain = flexd.EmbeddingCollection(tables[1:])
    assert flexd.join_collections(pooled, plain).pools
