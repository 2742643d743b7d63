"""Pooled features: bags that are refused, and gradients that are dropped or add up. Training: test_any_training.py."""

import pytest
import torch

import flexd
from flexd.core.placement import RankLayout
from tests.support.rank_pool import Ranks, error_of


def tables(pooling_at: str) -> list[flexd.EmbeddingTable]:
    item = flexd.EmbeddingBagTable("item", 61, 8, ("history", "basket"), "float64", pooling_at=pooling_at)
    return [item, flexd.EmbeddingBagTable("shop", 17, 5, (), "float64", pooling="mean", pooling_at=pooling_at)]


def refused(rank: int, layout: RankLayout, faulty: int, pooling_at: str) -> list[str]:
    """Return the errors of invalid bags on every rank, with a valid batch in between."""
    collection = flexd.EmbeddingBagCollection(tables(pooling_at), layout=layout)
    ids = torch.tensor([1, 2, 3])
    good = {"history": flexd.Jagged(ids, torch.tensor([2, 1])), "shop": flexd.Jagged(ids, torch.tensor([3]))}
    faults: list[tuple[dict[str, flexd.Jagged], dict[str, torch.Tensor]]] = [
        ({"history": flexd.Jagged(ids, torch.tensor([2, 2]))}, {}),
        ({"history": flexd.Jagged(ids, torch.tensor([4, -1]))}, {}),
        ({"history": flexd.Jagged(ids, torch.tensor([1])), "shop": flexd.Jagged(ids, torch.tensor([3]))}, {}),
        ({"history": flexd.Jagged(ids[:0], torch.tensor([5])), "shop": flexd.Jagged(ids, torch.tensor([3]))}, {}),
        ({"history": flexd.Jagged(ids, ids[:0])}, {}),
        ({"history": flexd.Jagged(ids + 60, torch.tensor([3]))}, {}),
        (good, {"shop": torch.ones(3, dtype=torch.float64)}),
        (good, {"history": torch.ones(2, dtype=torch.float64)}),
        (good, {"history": torch.ones(3, dtype=torch.int64)}),
        (good, {"basket": torch.ones(3)}),
    ]
    errors = []
    for features, weights in faults:
        errors.append(error_of(collection, *((features, weights) if rank == faulty else (good, None))))
        sum(part.sum() for part in collection(good).values()).backward()
        collection.optimizer.step()
    return errors


@pytest.mark.parametrize("pooling_at", ["requester", "owner"])
@pytest.mark.parametrize("faulty", [0, 1])
def test_invalid_bags_are_refused_on_every_rank(ranks: Ranks, faulty: int, pooling_at: str) -> None:
    causes = [
        "lengths from 2 on sum to 4, for 3 ids", "lengths from -1 on", "lengths from 1 on sum to 1, for 3 ids",
        "lengths from 5 on sum to 5, for 0 ids", "lengths from 0 on sum to 0, for 3 ids", "row 63 of table",
        "pooled by mean", "for ids of shape (3,)", "torch.int64 on cpu", "the feature is not in the batch",
    ]  # fmt: skip
    for rank, errors in enumerate(ranks(2).run(refused, RankLayout(2, 1), faulty, pooling_at)):
        for text, cause in zip(errors, causes, strict=True):
            assert (cause if rank == faulty else f"rank {faulty} has input") in text


@pytest.mark.parametrize("pooling_at", ["requester", "owner"])
def test_dropped_gradients_change_nothing_and_several_backward_passes_add_up(pooling_at: str) -> None:
    collection = flexd.EmbeddingBagCollection(tables(pooling_at), optimizer=flexd.SGD(0.5))
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


def test_two_backward_passes_over_one_forward_pass_are_added_in_float32() -> None:
    """2048 + 1 + 1 is 2048 in float16."""
    collection = flexd.EmbeddingBagCollection(
        [flexd.EmbeddingBagTable("item", 9, 4, dtype="float16")], optimizer=flexd.SGD(2.0**-10)
    )
    collection.load_rows("item", 0, torch.zeros(9, 4))
    bags = collection({"item": flexd.Jagged(torch.tensor([3]), torch.tensor([1]))})["item"]
    for weight in (2048.0, 1.0, 1.0):
        (bags * weight).sum().backward(retain_graph=True)
    collection.optimizer.step()
    assert torch.equal(collection.gather_table("item")[3], torch.full((4,), -2050.0 / 1024.0).half())
