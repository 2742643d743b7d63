"""Changes of the placement on real gloo ranks: directories, slots, look-ups, refused chunks and faults."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from flexd.core.placement import Delta, Placement
from tests.support.collection_jobs import ROWS, listed_by, random_placement
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


ENDS = np.cumsum(list(ROWS.values()))


LAYOUTS = [(1, 2), (2, 1), (2, 2), (3, 2)]


def chunk(tiers: dict[int, int], before: dict[int, int] | None = None) -> Delta:
    """Return a chunk of these rows, in this order."""
    keys = np.array(list(tiers), dtype=np.int64)
    old = np.array([(before or {}).get(key, 0) for key in tiers], dtype=np.uint8)
    return Delta(keys, old, np.array(list(tiers.values()), dtype=np.uint8))


def used_slots(layout: RankLayout, placement: Placement) -> np.ndarray:
    """Return int64 [groups, ranks]."""
    group = np.searchsorted(ENDS, placement.keys, side="right")
    return np.stack(
        [layout.replica_slots_used(placement.keys[group == g], placement.tiers[group == g]) for g in range(len(ROWS))]
    )


EVERY_MOVE = [
    Delta.empty(),
    chunk({84: 2, 0: 1, 1: 1, 2: 2, 60: 2, 61: 1, 83: 2, 5: 1, 86: 1}),
    # NODE->DEVICE, DEVICE->NODE, HOME->DEVICE, DEVICE->HOME, NODE->HOME and HOME->NODE at once, keys not sorted.
    chunk({5: 2, 60: 1, 30: 2, 2: 0, 1: 0, 31: 1, 83: 1, 61: 2, 84: 0}, {5: 1, 60: 2, 2: 2, 1: 1, 83: 2, 61: 1, 84: 2}),
    Delta.empty(),
    chunk({key: 2 for key in range(61, 87) if key not in (61, 83, 86)}),
    chunk(dict.fromkeys(range(61, 87), 0), {key: {83: 1, 86: 1}.get(key, 2) for key in range(61, 87)}),
    chunk(dict.fromkeys(range(61, 87), 2)),
]


@pytest.mark.parametrize(("nodes", "local_ranks"), [(1, 1), *LAYOUTS])
def test_directories_and_slots_follow_the_placement(ranks: Ranks, nodes: int, local_ranks: int) -> None:
    layout = RankLayout(nodes, local_ranks)
    slots = [61, 23, 3]
    results = ranks(layout.world_size).run("migration_jobs:follow_placements", layout, EVERY_MOVE, slots)
    placement = Placement.empty()
    for step, delta in enumerate(EVERY_MOVE):
        placement = placement.apply(delta)
        free = np.array(slots)[:, None] - used_slots(layout, placement)
        for rank, result in enumerate(results):
            state = result[step]
            expected = listed_by(layout, rank, placement)
            assert state["version"] == step + 1
            assert state["digest"] == placement.digest()
            assert state["keys"].tolist() == expected.keys.tolist()
            assert state["tiers"].tolist() == expected.tiers.tolist()
            assert state["free"] == free[:, rank].tolist()
            assert state["slots_distinct"]
            assert state["lookups_right"]
            assert state["bit_equal"]


@pytest.mark.parametrize(
    "wrong",
    [chunk({3: 1, 4: 2}, {3: 2}), chunk({0: 0, 1: 0}, {0: 1, 1: 2}), chunk({9: 0}, {9: 2}), chunk({0: 2}, {0: 0})],
    ids=["other tier", "one of two", "not listed", "listed"],
)
def test_a_chunk_from_another_placement_changes_nothing(ranks: Ranks, wrong: Delta) -> None:
    """Keys 0 and 1, whose homes are on different nodes, are at DEVICE, key 3 is at NODE and key 9 at HOME."""
    good = chunk({0: 2, 1: 2, 3: 1})
    results = ranks(2).run("migration_jobs:wrong_chunk", RankLayout(2, 1), good, wrong)
    for text, unchanged in results:
        assert "PlacementError" in text
        assert "not at the tier that it states" in text
        assert unchanged


def test_a_chunk_applied_in_inference_mode_can_be_trained_on(ranks: Ranks) -> None:
    delta = Placement.empty().delta_to(random_placement(4))
    assert all(ranks(4).run("migration_jobs:chunk_in_inference_mode", RankLayout(2, 2), delta))


@pytest.mark.parametrize(("nodes", "local_ranks", "faulty"), [(1, 1, 0), (2, 2, 2), (2, 1, 0), (1, 2, 1)])
def test_ranks_apply_the_same_chunks_after_a_fault(ranks: Ranks, nodes: int, local_ranks: int, faulty: int) -> None:
    layout = RankLayout(nodes, local_ranks)
    delta = Placement.empty().delta_to(random_placement(5))
    for states in ranks(layout.world_size).run("migration_jobs:fault_beside_a_chunk", layout, delta, faulty):
        assert states == [(1, 0, True), (1, 1, True)]
