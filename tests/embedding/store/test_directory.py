"""The directory compared with a dict."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import DimGroup
from flexd.core.placement import RankLayout, Tier
from flexd.embedding.store.directory import BLOCK, Directory, EntryPool, max_directory_bytes


@pytest.mark.parametrize("left", [0, 5])
def test_a_pool_of_few_rows_is_compacted(left: int) -> None:
    pool = EntryPool(2)
    numbers = pool.allocate(np.arange(100 * BLOCK) % 2)
    pool.release(numbers[left:])
    changes = pool.changes
    moved = pool.compact()
    assert moved is not None
    assert pool.changes > changes
    assert pool.owners.tolist() == ([0, 1] if left else [])
    assert [int(moved[number]) for number in numbers[:left].tolist()] == ([0, 64, 1, 65, 2] if left else [])
    assert pool.allocate(np.array([0, 1], dtype=np.int64)).tolist() == ([3, 66] if left else [0, 64])
    assert pool.compact() is None


CPU = torch.device("cpu")
GROUPS = [
    DimGroup(2, "float32", "sgd", 0, 610, (0,)), DimGroup(8, "float32", "sgd", 610, 230, (1,)),
    DimGroup(4, "float32", "sgd", 840, 400, (2,)),
]  # fmt: skip
Rows = dict[int, tuple[int, int]]
"""Key to (tier, slot)."""


def group_of(key: int) -> int:
    return next(number for number, group in enumerate(GROUPS) if key < group.end_key)


def change(directory: Directory, removed: list[int], new: Rows) -> None:
    directory.change(
        np.array(removed, dtype=np.int64), np.array(list(new), dtype=np.int64),
        np.array([slot for _, slot in new.values()], dtype=np.int32),
        np.array([tier for tier, _ in new.values()], dtype=np.uint8),
    )  # fmt: skip


def check(directory: Directory, expected: Rows, groups: int) -> dict[int, int]:
    """Compare with a dict; return the number of each row in its pool."""
    end = GROUPS[groups - 1].end_key
    keys = torch.arange(end)
    assert len(directory) == len(expected)
    entries = torch.full_like(keys, -1)
    if expected:
        entries = directory.find(keys)
        assert (entries != directory.entries).nonzero().view(-1).tolist() == sorted(expected)
    listed = torch.tensor(sorted(expected), dtype=torch.int64)
    found = entries[listed]
    assert len(set(found.tolist())) == len(expected)
    assert directory.slots_at(found).tolist() == [expected[key][1] for key in listed.tolist()]
    assert (directory.places_at(found) < 0).tolist() == [expected[key][0] == Tier.DEVICE for key in listed.tolist()]
    numbers = {}
    for key, entry in zip(listed.tolist(), found.tolist(), strict=True):
        pool = 2 * group_of(key) + (expected[key][0] == Tier.DEVICE)
        assert directory.starts[pool] <= entry < directory.starts[pool + 1]
        numbers[key] = entry - directory.starts[pool]
        assert (
            directory.pools[pool].owners[numbers[key] // 64]
            == directory.places_by_home[key % directory.layout.world_size]
        )
    tiers, slots = directory.read(np.arange(end, dtype=np.int64))
    assert tiers.tolist() == [expected.get(key, (0, 0))[0] for key in range(end)]
    assert slots.tolist() == [expected.get(key, (0, -1))[1] for key in range(end)]
    all_keys, all_tiers, all_slots = directory.rows()
    assert (
        dict(zip(all_keys.tolist(), zip(all_tiers.tolist(), all_slots.tolist(), strict=True), strict=True)) == expected
    )
    assert directory.nbytes <= max_directory_bytes(1240, directory.layout.world_size, groups, end)
    return numbers


def blocks_of(directory: Directory) -> tuple[list[int], list[list[int]]]:
    return directory.starts, [pool.owners.tolist() for pool in directory.pools]


def test_rows_with_numbers_of_blocks_that_exist_leave_the_blocks_as_they_are() -> None:
    directory = Directory(GROUPS[:1], RankLayout(2, 2), 0, 600, CPU)
    change(directory, [], {key: (Tier.DEVICE, key) for key in range(8)})
    version, before = directory.blocks_version, blocks_of(directory)
    change(directory, [1, 2], {key: (Tier.DEVICE, key) for key in range(8, 200)})
    assert directory.blocks_version == version
    assert blocks_of(directory) == before
    change(directory, [], {key: (Tier.NODE, key) for key in (1,)})
    assert directory.blocks_version != version, "the first NODE row has a block of its own"


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from([RankLayout(1, 1), RankLayout(2, 2), RankLayout(3, 2)]), groups=st.integers(1, 3),
    seed=st.integers(0, 10**6), chunks=st.integers(1, 8),
)  # fmt: skip
def test_a_directory_equals_a_dict(layout: RankLayout, groups: int, seed: int, chunks: int) -> None:
    """Another one, which lists further NODE rows, gives the common DEVICE rows the same numbers."""
    rng = np.random.default_rng(seed)
    made, other = (Directory(GROUPS[:groups], layout, 0, 1240, CPU) for _ in range(2))
    more = Directory(GROUPS[:groups], layout, 0, 0, CPU)
    expected: Rows = {}
    numbers: dict[int, int] = {}
    for _ in range(chunks):
        share, width = rng.random(), rng.choice([0.01, 0.2, 0.9])
        removed = [key for key in expected if rng.random() < share]
        kept = {key: value for key, value in expected.items() if key not in set(removed)}
        end = GROUPS[groups - 1].end_key
        drawn = {
            key: (int(rng.integers(1, 3)), int(rng.integers(0, 2**31 - 1)))
            for key in range(end) if key not in kept and rng.random() < width
        }  # fmt: skip
        blocks = [pool.blocks for pool in made.pools]
        version, before = made.blocks_version, blocks_of(made)
        for directory in (made, more):
            change(directory, removed, drawn)
        device = {key: value for key, value in drawn.items() if value[0] == Tier.DEVICE}
        change(other, [key for key in removed if expected[key][0] == Tier.DEVICE], device)
        expected = kept | drawn
        assert made.blocks_version != version or blocks_of(made) == before
        now = check(made, expected, groups)
        assert check(more, expected, groups) == now
        in_other = check(other, {key: value for key, value in expected.items() if value[0] == Tier.DEVICE}, groups)
        assert in_other == {key: now[key] for key in in_other}
        if all(pool.blocks >= before for pool, before in zip(made.pools, blocks, strict=True)):
            assert all(now[key] == number for key, number in numbers.items() if key in kept), "numbers are stable"
        numbers = now
    for group in range(groups):
        for tier in (Tier.NODE, Tier.DEVICE):
            entries = made.at_tier(group, tier)
            rows = [key for key in expected if group_of(key) == group and expected[key][0] == tier]
            assert sorted(made.slots_at(entries).tolist()) == sorted(expected[key][1] for key in rows)
            assert entries.tolist() == sorted(entries.tolist())


@pytest.mark.parametrize(("first", "rows"), [(2**40, 2**31 - 4), (2**40 + 3, 2**33)])
def test_the_last_rows_of_large_groups(first: int, rows: int) -> None:
    directory = Directory([DimGroup(2, "float32", "sgd", first, rows, (0,))], RankLayout(2, 2), 0, 10, CPU)
    keys = [first, first + rows - 3, first + rows - 2, first + rows - 1]
    change(directory, [], {key: (2 - at % 2, 2**31 - 1 - at) for at, key in enumerate(keys)})
    entries = directory.find(torch.tensor([*keys, keys[1] - 1]))
    assert (entries == directory.entries).tolist() == [False, False, False, False, True]
    assert directory.slots_at(entries[:4]).tolist() == [2**31 - 1 - at for at in range(4)]
    assert (directory.places_at(entries[:4]) < 0).tolist() == [True, False, True, False]
