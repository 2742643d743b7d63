"""Placements and deltas against a dictionary of row -> tier."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexd.core.errors import PlacementError
from flexd.core.layout import REHOMED
from flexd.core.placement import Delta, Placement

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
        assert placement.version == 3 + number
        assert placement.digest() == digest
    assert np.array_equal(placement.keys, target.keys)
    assert np.array_equal(placement.tiers, target.tiers)


def test_digests_tell_rows_and_their_nodes_apart() -> None:
    digests = {placement_of({key: tier}).digest() for key in range(64) for tier in range(1, 256)}
    assert len(digests) == 64 * 255


def test_repeated_rows_and_deltas_of_another_placement_are_refused() -> None:
    with pytest.raises(PlacementError, match="twice"):
        Placement.of(np.array([4, 4]), np.array([1, 2], dtype=np.uint8))
    placement = placement_of({4: 1})
    with pytest.raises(PlacementError, match="does not start from"):
        placement.apply(Delta(np.array([4]), np.array([0], np.uint8), np.array([2], np.uint8)))
    with pytest.raises(PlacementError, match="twice"):
        placement.apply(Delta(np.array([5, 5]), np.zeros(2, np.uint8), np.ones(2, np.uint8)))
