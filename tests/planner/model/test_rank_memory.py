"""Memory of a rank: against what a rank really allocates, and buffers against their sums by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from flexd.core.homes import Homes
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.embedding.store.directory import Directory, max_listed_rows
from flexd.embedding.store.store import make_stores
from flexd.planner.model.rank_memory import Buffer, placement_memory

KEYSPACE = KeySpace(
    [
        TableSpec("items", 1001, 16, "float16", "rowwise_adagrad"),
        TableSpec("users", 503, 16, "float16", "rowwise_adagrad"),
        TableSpec("tags", 77, 24),
    ]
)
LAYOUT = RankLayout(3, 2)


@pytest.mark.parametrize(
    "rules", [("all", "all", "all"), ("rank:4", "node:1", "rank:0"), ("node:2", "all", "every rank")]
)
def test_a_rank_allocates_what_is_said(rules: tuple[str, str, str]) -> None:
    keyspace = KeySpace([replace(table, homes=rule) for table, rule in zip(KEYSPACE.tables, rules, strict=True)])
    homes = Homes(keyspace, LAYOUT)
    slots = [np.array([5, 9, 5, 5, 7, 5]), np.array([3, 3, 3, 3, 3, 0])]
    rng = np.random.default_rng(1)
    keys = np.sort(rng.choice(1504, 12, replace=False)).astype(np.int64)
    placement = Placement.of(keys, rng.integers(1, 3, 12).astype(np.uint8))
    buffers = np.arange(24.0).reshape(4, 6)
    memory = placement_memory(keyspace, LAYOUT, slots, placement, buffers)
    for rank in range(LAYOUT.world_size):
        of_rank = [int(of_ranks[rank]) + homes.copied_slots(group) for group, of_ranks in enumerate(slots)]
        stores = make_stores(homes.groups, LAYOUT, rank, of_rank, torch.device("cpu"), homes=homes)
        allocated = sum(store.rows.nbytes + store.state.nbytes for store in stores)
        listed = (placement.tiers == Tier.DEVICE) | (
            (placement.tiers == Tier.NODE) & (homes.rail(placement.keys) == LAYOUT.local_rank_of(rank))
        )
        assert memory.home[rank] + memory.replicas[rank] == allocated
        room = sum(min(group.rows, int(of[rank]) * 3 // 2) for group, of in zip(KEYSPACE.groups, slots, strict=True))
        assert memory.directory[rank] == 10 * room + 8 * int(listed.sum())
        assert memory.total[rank] == memory.stored[rank] + buffers[:, rank].sum()
    told = memory.to_dict()
    fullest = int(memory.total.argmax())
    assert told["total_bytes"] == memory.total.max()
    assert told["buffer_bytes"]["sync"] == buffers[Buffer.SYNC, fullest]
    assert told["total_bytes"] == sum(
        (told["home_bytes"], told["replica_bytes"], told["directory_bytes"], *told["buffer_bytes"].values())
    )


def test_a_directory_takes_what_is_said() -> None:
    """Beside a few blocks of entries for each home, which count among few rows only."""
    keyspace = KeySpace([TableSpec("items", 400_000, 16)])
    rng = np.random.default_rng(3)
    keys = np.flatnonzero(rng.random(400_000) < 0.2).astype(np.int64)
    placement = Placement.of(keys, rng.integers(1, 3, len(keys)).astype(np.uint8))
    listed = (placement.tiers == Tier.DEVICE) | (placement.keys % 2 == 0)
    slots = len(keys)
    memory = placement_memory(keyspace, LAYOUT, [np.full(6, slots)], placement, np.zeros((4, 6)))
    (group,) = keyspace.groups
    directory = Directory([group], LAYOUT, 0, max_listed_rows(group, LAYOUT, slots), torch.device("cpu"))
    for part in np.array_split(np.flatnonzero(listed), 20):
        at = placement.keys[part], np.zeros(len(part), np.int32), placement.tiers[part]
        directory.change(np.empty(0, np.int64), *at)
    assert 0.9 * memory.directory[0] < directory.nbytes + 4 * int(listed.sum())
    assert directory.nbytes < memory.directory[0]
