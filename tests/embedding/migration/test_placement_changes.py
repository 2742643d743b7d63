"""Changes of the placement on real gloo ranks: directories, slots, look-ups, refused chunks and faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from tests.support import migration_jobs
from tests.support.collection_jobs import random_placement
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


def test_a_chunk_applied_in_inference_mode_can_be_trained_on(ranks: Ranks) -> None:
    delta = Placement.empty().delta_to(random_placement(4))
    assert all(ranks(4).run(migration_jobs.chunk_in_inference_mode, RankLayout(2, 2), delta))


@pytest.mark.parametrize(("nodes", "local_ranks", "faulty"), [(1, 1, 0), (2, 2, 2), (2, 1, 0), (1, 2, 1)])
def test_ranks_apply_the_same_chunks_after_a_fault(ranks: Ranks, nodes: int, local_ranks: int, faulty: int) -> None:
    layout = RankLayout(nodes, local_ranks)
    delta = Placement.empty().delta_to(random_placement(5))
    for states in ranks(layout.world_size).run(migration_jobs.fault_beside_a_chunk, layout, delta, faulty):
        assert states == [(1, 0, True), (1, 1, True)]
