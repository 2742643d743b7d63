"""A loader that deals: the same global batches, equal numbers per rank, fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.embedding.jagged import Jagged
from tests.support.rank_pool import RankPool


def samples_of_groups(samples: int) -> dict[str, Jagged]:
    """Make samples of one of 8 groups of rows."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 8, samples)
    lengths = rng.integers(1, 5, samples)
    ids = np.repeat(group, lengths) * 20 + rng.integers(0, 20, lengths.sum())
    return {"item": Jagged(torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32)))}


def sampled(rank: int, layout: RankLayout, batch_size: int, epochs: int) -> dict[str, Any]:
    """Return the indices that this rank reads in each epoch, and the bytes a step sends dealt and undealt."""
    everything = samples_of_groups(200)
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 160, 32)], layout=layout)
    sampler = flexd.affinity.NodeSampler(everything, collection, batch_size, seed=3)
    indices = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        indices.append(list(sampler))
    ids = torch.split(everything["item"].values, everything["item"].lengths.tolist())
    size = batch_size * layout.world_size
    order = np.random.default_rng([3, 0]).permutation(200)
    undealt = [order[at * size : (at + 1) * size][rank :: layout.world_size].tolist() for at in range(len(sampler))]
    sent = []
    for batches in (undealt, indices[0]):
        before = collection.traffic.totals()["all_to_all_inter_bytes"]
        for chosen in batches:
            values = torch.cat([ids[at] for at in chosen])
            collection({"item": Jagged(values, torch.tensor([len(values)]))})["item"].values.sum().backward()
            collection.optimizer.step()
        sent.append(collection.traffic.totals()["all_to_all_inter_bytes"] - before)
    return {"indices": indices, "undealt": undealt, "length": len(sampler), "sent": sent}


def test_ranks_read_the_same_global_batches_and_send_less(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(4).run(sampled, RankLayout(2, 2), 12, 2)
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
