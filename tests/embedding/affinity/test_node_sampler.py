"""A loader that deals: the same global batches, equal numbers a rank, fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from flexd.embedding.jagged import Jagged
from tests.support import node_sampler_jobs
from tests.support.rank_pool import RankPool


def test_ranks_read_the_same_global_batches_and_send_less(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(4).run(node_sampler_jobs.sampled, RankLayout(2, 2), 12, 2)
    assert [of_rank["length"] for of_rank in results] == [4] * 4
    for epoch in range(2):
        for number in range(4):
            batch = [of_rank["indices"][epoch][number] for of_rank in results]
            assert [len(of_rank) for of_rank in batch] == [12] * 4
            assert len(set(chain(*batch))) == 48
    first = [sorted(chain(*(of_rank[kind][0] for of_rank in results))) for kind in ("undealt",)]
    assert first[0] == sorted(chain(*(of_rank["indices"][0][0] for of_rank in results)))
    assert results[0]["indices"][0] != results[0]["indices"][1]
    undealt, dealt = (sum(of_rank["sent"][at] for of_rank in results) for at in range(2))
    assert dealt < 0.8 * undealt


@pytest.mark.parametrize(
    ("values", "lengths", "size", "says"),
    [([1, 2], [1, 1], 0, "batches of 0"), ([1, 99], [1, 1], 1, "out of range")],
)
def test_wrong_arguments_are_refused(values: list[int], lengths: list[int], size: int, says: str) -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 5, 4)], layout=RankLayout(1, 1))
    features = {"item": Jagged(torch.tensor(values), torch.tensor(lengths))}
    with pytest.raises(EmbeddingError, match=says):
        flexd.affinity.NodeSampler(features, collection, size)
