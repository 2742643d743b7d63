"""Which rank saves which whole table."""

from __future__ import annotations

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding.checkpoint import blocks
from flexd.embedding.checkpoint.owners import assign_owners


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 100), max_size=60), world=st.integers(1, 9), window=st.integers(1, 120))
def test_owners_ascend_with_even_shares_and_rounds_are_bounded(sizes: list[int], world: int, window: int) -> None:
    with mock.patch.object(blocks, "MAX_WINDOW_BYTES", window):
        owned = assign_owners(sizes, world)
    assert [of is None for of in owned] == [size > window for size in sizes]
    small = [(size, *of) for size, of in zip(sizes, owned, strict=True) if of is not None]
    owners = [owner for _, owner, _ in small]
    assert owners == sorted(owners)
    assert all(0 <= owner < world for owner in owners)
    total = sum(size for size, _, _ in small)
    for owner in set(owners):
        of_owner = [(size, number) for size, of, number in small if of == owner]
        assert sum(size for size, _ in of_owner) <= total / world + window + 1
        for number in {number for _, number in of_owner}:
            assert sum(size for size, of in of_owner if of == number) <= 2 * window
