"""Changes of the placement on real gloo ranks: directories, slots, look-ups, refused chunks and faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flexd.core.errors import EmbeddingError
from flexd.core.placement import Delta, Placement, RankLayout
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.jagged import Jagged
from tests.support import collection_jobs as jobs
from tests.support.collection_jobs import random_placement
from tests.support.rank_pool import RankPool


def chunk_in_inference_mode(rank: int, layout: RankLayout, delta: Delta) -> bool:
    """Apply a chunk inside ``torch.inference_mode`` and continue training."""
    collection = EmbeddingCollection(jobs.tables(), layout=layout, replica_slots=[60, 23, 3])
    jobs.offer(collection, delta)
    with torch.inference_mode():
        for _ in range(2):
            collection(jobs.everything())
    for step in range(2):
        jobs.train_step(collection, jobs.some(0, step, rank))
    return collection.placement_version == 1 and collection.replicas_bit_equal()


def fault_beside_a_chunk(rank: int, layout: RankLayout, delta: Delta, faulty: int) -> list[tuple[int, int, bool]]:
    """Pass invalid input on one rank in the exchange that agrees on a chunk."""
    collection = EmbeddingCollection(jobs.tables(), layout=layout, replica_slots=[60, 23, 3])
    jobs.offer(collection, delta)
    states = []
    bad = {"item": Jagged(torch.tensor([-1]), torch.tensor([1]))}
    try:
        collection(bad if rank == faulty else jobs.everything())
        raise AssertionError("no error")
    except EmbeddingError:
        states.append(
            (collection.engine.inbox.agreed_version, collection.placement_version, len(collection.engine.passes) == 0)
        )
    jobs.train_step(collection, jobs.everything())
    states.append(
        (collection.engine.inbox.agreed_version, collection.placement_version, collection.replicas_bit_equal())
    )
    return states


Ranks = Callable[[int], RankPool]


def test_a_chunk_applied_in_inference_mode_can_be_trained_on(ranks: Ranks) -> None:
    delta = Placement.empty().delta_to(random_placement(4))
    assert all(ranks(4).run(chunk_in_inference_mode, RankLayout(2, 2), delta))


@pytest.mark.parametrize(("nodes", "local_ranks", "faulty"), [(1, 1, 0), (2, 2, 2), (2, 1, 0), (1, 2, 1)])
def test_ranks_apply_the_same_chunks_after_a_fault(ranks: Ranks, nodes: int, local_ranks: int, faulty: int) -> None:
    layout = RankLayout(nodes, local_ranks)
    delta = Placement.empty().delta_to(random_placement(5))
    for states in ranks(layout.world_size).run(fault_beside_a_chunk, layout, delta, faulty):
        assert states == [(1, 0, True), (1, 1, True)]
