"""The directories of all dim-groups as one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import DimGroup
from flexd.core.layout import RankLayout, Tier
from flexd.embedding.store.listed_rows import ListedRows
from flexd.embedding.store.store import GroupStore

CPU = torch.device("cpu")
GROUPS = [
    DimGroup(2, "float32", "sgd", 0, 61, (0,)), DimGroup(8, "float32", "sgd", 61, 23, (1,)),
    DimGroup(4, "float32", "sgd", 84, 40, (2,)),
]  # fmt: skip


def stores_of(layout: RankLayout, rank: int, listed: list[set[int]]) -> list[GroupStore]:
    """Stores whose directories list these keys, with ascending slots and every third row at DEVICE."""
    stores = []
    for group, keys in zip(GROUPS, listed, strict=False):
        store = GroupStore(group, layout, rank, 70, CPU)
        rows = torch.tensor(sorted(keys), dtype=torch.int64)
        tiers = torch.where(rows % 3 == 0, int(Tier.DEVICE), int(Tier.NODE)).to(torch.uint8)
        slots = (rows - group.first_key).to(torch.int32)
        store.directory = store.directory.replace(torch.empty(0, dtype=torch.int64), rows, slots, tiers)
        stores.append(store)
    return stores


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from([RankLayout(2, 2), RankLayout(3, 2), RankLayout(1, 4)]),
    groups=st.integers(1, 3), seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.3, 1.0]),
)  # fmt: skip
def test_rows_are_found_as_in_their_own_directory(layout: RankLayout, groups: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    chosen = [
        {int(key) for key in range(group.first_key, group.end_key) if rng.random() < share} for group in GROUPS[:groups]
    ]
    stores = stores_of(layout, 1, chosen)
    listed = ListedRows(stores)
    assert len(listed) == sum(map(len, chosen))
    keys = torch.arange(GROUPS[groups - 1].end_key)
    group = torch.bucketize(keys, torch.tensor([g.end_key for g in GROUPS]), right=True)
    entries = torch.full_like(keys, -1)
    if len(listed):
        is_listed, found_at = listed.find(
            keys // layout.world_size, group * layout.world_size + keys % layout.world_size
        )
        entries = torch.where(is_listed, found_at, -1)
    for number, store in enumerate(stores):
        mine = keys[store.group.first_key : store.group.end_key]
        at, found = store.directory.find(mine)
        expected = torch.where(found, at + listed.first_entries[number], -1)
        assert torch.equal(entries[mine], expected)
        here = mine[found]
        assert torch.equal(listed.slots_at(entries[here]), here - store.group.first_key)
        assert torch.equal(listed.on_device_tier(entries[here]), here % 3 == 0)
    of_homes = 8 * groups * layout.world_size if len(listed) else 0
    assert (listed.nbytes == of_homes) == (groups == 1 or len(listed) == 0)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_new_directory_of_any_group_is_noticed(changed: int) -> None:
    stores = stores_of(RankLayout(2, 2), 0, [{1, 2}, {70}])
    listed = ListedRows(stores)
    assert listed.is_of(stores)
    other = stores_of(RankLayout(2, 2), 0, [{1, 2}, {70}])
    stores[changed].directory = other[changed].directory
    assert not listed.is_of(stores)
