"""Numbers of listed rows compared with a dict, on ranks that list different rows beside the common ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding.store.entry_pool import BLOCK, EntryPool

HOMES = 6


def check(pool: EntryPool, homes: dict[int, int], numbers: dict[int, int]) -> None:
    """Every row has a number of its own in a block of its home."""
    assert len(pool) == len(numbers)
    assert len(set(numbers.values())) == len(numbers)
    blocks, starts = pool.blocks_by_home()
    assert sorted(blocks.tolist()) == list(range(pool.blocks))
    for home in range(HOMES):
        of_home = blocks[starts[home] : starts[home + 1]].tolist()
        assert of_home == sorted(of_home)
        assert all(pool.owners[block] == home for block in of_home)
    assert all(pool.owners[number // BLOCK] == homes[row] for row, number in numbers.items())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), chunks=st.integers(1, 12), width=st.sampled_from([3, 40, 400]))
def test_numbers_are_stable_and_depend_on_the_changes_alone(seed: int, chunks: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    pools = [EntryPool(HOMES), EntryPool(HOMES)]
    homes: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for _ in range(chunks):
        listed = sorted(numbers)
        share = rng.random()
        gone = [row for row in listed if rng.random() < share]
        fresh = [row for row in range(2000) if row not in numbers and rng.random() < width / 2000]
        at = np.array([row * row % 7 % HOMES for row in fresh], dtype=np.int64)
        given = []
        for pool in pools:
            pool.release(np.array([numbers[row] for row in gone], dtype=np.int32))
            given.append(pool.allocate(at))
        assert given[0].tolist() == given[1].tolist()
        kept = {row: number for row, number in numbers.items() if row not in set(gone)}
        numbers = kept | dict(zip(fresh, given[0].tolist(), strict=True))
        homes |= dict(zip(fresh, at.tolist(), strict=True))
        check(pools[0], homes, numbers)
        moved = [pool.compact() for pool in pools]
        assert (moved[0] is None) == (moved[1] is None)
        if moved[0] is not None:
            assert moved[0].tolist() == moved[1].tolist()  # type: ignore[union-attr]
            assert np.count_nonzero(moved[0] >= 0) == len(numbers)
            numbers = {row: int(moved[0][number]) for row, number in numbers.items()}
            check(pools[0], homes, numbers)
        assert pools[0].blocks * BLOCK <= 2 * (len(numbers) + HOMES * BLOCK) + 16 * BLOCK


def test_blocks_grow_by_the_rows_and_freed_numbers_are_given_again() -> None:
    pool = EntryPool(2)
    first = pool.allocate(np.zeros(BLOCK + 1, dtype=np.int64))
    assert first.tolist() == list(range(BLOCK + 1))
    assert pool.allocate(np.ones(1, dtype=np.int64)).tolist() == [2 * BLOCK]
    pool.release(first[3:5])
    assert pool.allocate(np.zeros(3, dtype=np.int64)).tolist() == [4, 3, BLOCK + 1]
    assert pool.blocks == 3
    assert pool.nbytes >= 4 * pool.blocks


@pytest.mark.parametrize("left", [0, 5])
def test_a_pool_of_few_rows_is_compacted(left: int) -> None:
    pool = EntryPool(2)
    numbers = pool.allocate(np.arange(100 * BLOCK) % 2)
    pool.release(numbers[left:])
    changes = pool.changes
    moved = pool.compact()
    assert moved is not None
    assert pool.changes > changes
    assert pool.blocks == (2 if left else 0)
    assert [int(moved[number]) for number in numbers[:left].tolist()] == ([0, 64, 1, 65, 2] if left else [])
    assert pool.allocate(np.array([0, 1], dtype=np.int64)).tolist() == ([3, 66] if left else [0, 64])
    assert pool.compact() is None
