"""Arithmetic of homes, node owners and replicas against definitions row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexd.core.errors import TopologyError
from flexd.core.layout import REHOMED, RankLayout, Tier

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
