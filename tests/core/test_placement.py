"""Placements and deltas against a dictionary of row -> tier."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexd.core.errors import PlacementError, TopologyError
from flexd.core.placement import REHOMED, Delta, Placement, RankLayout, Tier

LAYOUTS = st.builds(RankLayout, st.integers(1, 4), st.integers(1, 4))


@given(LAYOUTS, st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, REHOMED + 3)), max_size=30))
def test_replicas_are_on_the_ranks_of_the_tier(layout: RankLayout, rows: list[tuple[int, int]]) -> None:
    """Those of NODE and DEVICE beside the home copy, that of a re-homed row on the node owner of its node."""
    rows = [(key, tier) for key, tier in rows if tier < REHOMED + layout.nodes]
    keys = np.array([key for key, _ in rows], dtype=np.int64)
    tiers = np.array([tier for _, tier in rows], dtype=np.uint8)
    holders: list[set[int]] = []
    for key, tier in rows:
        home = key % layout.world_size
        everywhere = {
            Tier.HOME: {home},
            Tier.NODE: {layout.rank_of(node, key % layout.local_ranks) for node in range(layout.nodes)},
            Tier.DEVICE: set(range(layout.world_size)),
        } | {REHOMED + node: {layout.rank_of(node, key % layout.local_ranks)} for node in range(layout.nodes)}
        everywhere = everywhere[tier]
        assert home in everywhere or tier >= REHOMED, "the node owner in the home's node is the home"
        holders.append(everywhere - {home})
    used = layout.replica_slots_used(keys, tiers)
    for rank in range(layout.world_size):
        held = layout.holds_replica(rank, keys, tiers)
        assert held.tolist() == [rank in ranks for ranks in holders]
        assert used[rank] == held.sum()
    assert layout.home_node(keys).tolist() == [key % layout.world_size // layout.local_ranks for key, _ in rows]


def test_a_layout_without_ranks_is_refused() -> None:
    with pytest.raises(TopologyError, match="0 nodes"):
        RankLayout(0, 2)


TIERS = st.dictionaries(st.integers(0, 2**40), st.one_of(st.integers(0, 2), st.integers(0, 255)), max_size=30)
"""With re-homed rows."""


def placement_of(tiers: dict[int, int], version: int = 0) -> Placement:
    return Placement.of(np.array(list(tiers), dtype=np.int64), np.array(list(tiers.values()), dtype=np.uint8), version)


@given(TIERS, TIERS, st.integers(1, 7))
def test_the_chunks_of_a_delta_lead_from_one_placement_to_the_other(
    before: dict[int, int], after: dict[int, int], rows_per_chunk: int
) -> None:
    start, target = placement_of(before, 3), placement_of(after)
    delta = start.delta_to(target)
    old, new = delta.old_tiers, delta.new_tiers
    frees = (new == 0) | ((new < old) & (old < REHOMED))
    needs = (old == 0) | ((new > old) & (new < REHOMED))
    assert (np.diff(np.where(frees, 0, np.where(needs, 2, 1))) >= 0).all(), "what frees slots comes first"
    placement, digest = start, start.digest()
    for number, chunk in enumerate(delta.chunks(rows_per_chunk), start=1):
        assert 1 <= len(chunk) <= rows_per_chunk
        placement, digest = placement.apply(chunk), (digest + chunk.digest_change()) % 2**64
        assert (placement.version, placement.digest()) == (3 + number, digest)
    assert np.array_equal(placement.keys, target.keys)
    assert np.array_equal(placement.tiers, target.tiers)


def test_digests_tell_rows_and_their_nodes_apart() -> None:
    assert len({placement_of({key: tier}).digest() for key in range(64) for tier in range(1, 256)}) == 64 * 255


def test_repeated_rows_and_deltas_of_another_placement_are_refused() -> None:
    with pytest.raises(PlacementError, match="twice"):
        Placement.of(np.array([4, 4]), np.array([1, 2], dtype=np.uint8))
    placement = placement_of({4: 1})
    with pytest.raises(PlacementError, match="does not start from"):
        placement.apply(Delta(np.array([4]), np.array([0], np.uint8), np.array([2], np.uint8)))
    with pytest.raises(PlacementError, match="twice"):
        placement.apply(Delta(np.array([5, 5]), np.zeros(2, np.uint8), np.ones(2, np.uint8)))
