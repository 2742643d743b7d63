"""Evaluation without gradients: copies are read, none is synchronised, and training goes on as without it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import flexd
from flexd.core.placement import Delta, RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.features import Jagged
from tests.support.rank_pool import Ranks

ROWS, DIM, STEPS = 60, 4, 4


def batches(rank: int, first: int) -> Iterator[dict[str, Jagged]]:
    for step in range(first, first + STEPS):
        ids = np.random.default_rng([rank, step]).integers(0, ROWS, 20)
        yield {"item": Jagged(torch.from_numpy(ids), torch.tensor([20]))}


def loop(of: Iterator[dict[str, Jagged]], collection: EmbeddingCollection, ahead: int) -> Iterator[dict[str, Jagged]]:
    return iter(flexd.prefetch(of, collection, ahead=ahead)) if ahead else of


def trained(collection: EmbeddingCollection, rank: int, first: int, ahead: int) -> None:
    for features in loop(batches(rank, first), collection, ahead):
        collection(features)["item"].values.square().sum().backward()
        collection.optimizer.step()


def job(rank: int, exchange: str, ahead: int, evaluate: bool) -> dict[str, Any]:
    """Train, copy every row to every rank, train, evaluate, train."""
    collection = EmbeddingCollection(
        [EmbeddingTable("item", ROWS, DIM)], layout=RankLayout(2, 1), optimizer=flexd.Adagrad(0.1),
        replica_slots=[ROWS], exchange=exchange, seed=3,
    )  # fmt: skip
    found: dict[str, Any] = {}
    trained(collection, rank, 0, ahead)
    delta = Delta(np.arange(ROWS), np.zeros(ROWS, np.uint8), np.full(ROWS, 2, np.uint8))
    collection.engine.inbox.offer(1, delta)
    trained(collection, rank, 10, ahead)
    assert collection.placement_version == 1
    if evaluate:
        table, before, steps = collection.gather_table("item"), collection.traffic.totals(), collection.steps
        with torch.no_grad():
            for features in loop(batches(rank, 20), collection, ahead):
                rows = collection(features)["item"].values
                assert not rows.requires_grad
                assert torch.equal(rows, table[features["item"].values])
        after = collection.traffic.totals()
        found = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        assert collection.steps == steps
        assert not collection.engine.passes
    trained(collection, rank, 30, ahead)
    found["equal"] = collection.replicas_bit_equal()
    found["table"] = collection.gather_table("item").numpy()
    collection.close()
    return found


@pytest.mark.parametrize("exchange", ["chain", "direct"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_copies_are_read_and_none_is_synchronised(ranks: Ranks, exchange: str, ahead: int) -> None:
    evaluated, not_evaluated = (ranks(2).run(job, exchange, ahead, each) for each in (True, False))
    for with_it, without in zip(evaluated, not_evaluated, strict=True):
        assert with_it["equal"]
        assert with_it["device_accesses"] == 20 * STEPS
        # Sizes and agreements alone: an id is 8 bytes, a row 16.
        assert with_it["all_to_all_inter_bytes"] <= 48 * STEPS
        # The pipeline tells ahead which copies a batch touches, a bit of each, as it may be trained.
        assert with_it.get("sync_inter_bytes", 0) <= 32 * STEPS * ahead
        assert np.array_equal(with_it["table"], without["table"])
