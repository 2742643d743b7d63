"""Bytes that steps wait for with the prefetch pipeline, and memory that it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexd
from flexd.core.placement import RankLayout
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.features import Jagged
from tests.support.prefetch_pipeline_jobs import pipeline_of
from tests.support.rank_pool import RankPool


def count_bytes(rank: int, layout: RankLayout, ids: list[list[list[int]]], exchange: str) -> list[dict[str, Any]]:
    """Return the bytes and the overlapped bytes of each step over ``ids[rank]``."""
    collection = EmbeddingCollection([EmbeddingTable("item", 60, 4)], layout=layout, exchange=exchange)
    loader = [{"item": Jagged(torch.tensor(part), torch.tensor([len(part)]))} for part in ids[rank]]
    traffic = []

    def totals() -> tuple[int, int]:
        pipeline = pipeline_of(collection)
        assert pipeline is not None
        pipeline.wait()
        return tuple(
            counted.all_to_all_intra_bytes + counted.all_to_all_inter_bytes
            for counted in (collection.traffic, pipeline.overlapped)
        )

    for features in flexd.prefetch(loader, collection):
        before = totals()
        collection(features)["item"].values.sum().backward()
        collection.optimizer.step()
        after = totals()
        traffic.append({"all": after[0] - before[0], "overlapped": after[1] - before[1]})
    return traffic


Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(("layout", "exchange"), [((2, 1), "chain"), ((2, 2), "chain"), ((2, 2), "direct")])
def test_a_step_waits_only_for_rows_of_both_batches(ranks: Ranks, layout: tuple[int, int], exchange: str) -> None:
    """Rows have 16 bytes. Batches have no row in common at first, then all rows."""
    world = layout[0] * layout[1]
    apart = [[list(range(20 * (step % 3), 20 * (step % 3) + 20)) for step in range(6)]] * world
    for step in ranks(world).run(count_bytes, RankLayout(*layout), apart, exchange)[0][1:-1]:
        assert step["all"] == step["overlapped"] > 0
    same = [[list(range(20))] * 6] * world
    results = ranks(world).run(count_bytes, RankLayout(*layout), same, exchange)
    for result in results:
        for step in result[1:-1]:
            waited = step["all"] - step["overlapped"]
            assert waited % 16 == 0, "ids are sent ahead"
            assert waited == result[1]["all"] - result[1]["overlapped"] > 0
    # Each rank requests and serves 20 rows in both directions, without the rows that it holds itself.
    if exchange == "direct" or layout == (2, 1):
        waited = sum(result[1]["all"] - result[1]["overlapped"] for result in results)
        assert waited == 2 * 16 * 20 * (world - 1)


def test_held_memory_is_bounded_and_counted() -> None:
    """With the same 30 ids in every batch the held bytes are equal after every step."""
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 50, 4)], layout=RankLayout(1, 1))
    loader = [{"item": flexd.Jagged(torch.arange(30), torch.tensor([30]))} for _ in range(9)]
    pending = []
    for features in flexd.prefetch(loader, collection):
        collection(features)["item"].values.sum().backward()
        collection.optimizer.step()
        pending.append(collection.engine.memory().pending_bytes)
    assert len(set(pending[1:-1])) == 1
    rows, ids = 30 * 4 * 4, 30 * 8
    assert rows + ids <= pending[1] <= 2 * rows + 30 * ids
    marks, keys, slots = 50, 50 * 8, 50 * 8
    assert collection.engine.memory().working_bytes >= marks + 2 * (keys + slots)
    assert collection.engine.memory().pending_bytes < pending[1]
