"""Touched rows compared with sets: all ranks of an exchange in one process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from flexd.core.keyspace import DimGroup
from flexd.core.layout import RankLayout, Tier
from flexd.embedding import devices
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.replicas import row_bits
from flexd.embedding.replicas.replica_sums import SumLists
from flexd.embedding.replicas.replica_sync import ReplicaSync
from flexd.embedding.replicas.touched_rows import SyncList, SyncLists
from flexd.embedding.store.store import GroupStore, make_stores

CPU = torch.device("cpu")
ROWS = 150
GROUPS = [DimGroup(2, "float32", "sgd", 0, 70, (0,)), DimGroup(3, "float32", "sgd", 70, 80, (1,))]


def hops_of(layout: RankLayout, rank: int, *, direct: bool) -> list[Hop]:
    node, local = layout.node_of(rank), layout.local_rank_of(rank)
    chain = (
        (layout.node_ranks(node), lambda homes: homes % layout.local_ranks),
        (layout.rail_ranks(local), lambda homes: homes // layout.local_ranks),
    )
    hops = []
    for ranks, destination in ((range(layout.world_size), lambda homes: homes),) if direct else chain:
        peers: Any = SimpleNamespace(
            rank=rank, ranks=list(ranks), size=len(ranks), index=list(ranks).index(rank),
            far=[layout.node_of(peer) != node for peer in ranks],
        )  # fmt: skip
        if peers.size > 1:
            hops.append(Hop(peers, destination, all_reduces=False))
    return hops


def stores_of(layout: RankLayout, rank: int, tiers: np.ndarray) -> list[GroupStore]:
    stores = make_stores(GROUPS, layout, rank, [ROWS] * len(GROUPS), CPU)
    keys = np.arange(ROWS)
    on_rail = (tiers == Tier.NODE) & (keys % layout.local_ranks == layout.local_rank_of(rank))
    listed = keys[(on_rail & (layout.nodes > 1)) | ((tiers == Tier.DEVICE) & (layout.world_size > 1))]
    slots = np.arange(len(listed), dtype=np.int32)
    stores[0].directory.change(np.empty(0, np.int64), listed, slots, tiers[listed].astype(np.uint8))
    return stores


@pytest.fixture(params=["words", "bytes"])
def on_host(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether bits are as in host memory; otherwise they are as on an accelerator."""
    with mock.patch.object(devices, "in_host_memory", return_value=request.param == "words"):
        yield request.param == "words"


def test_a_list_gathers_and_scatters_its_rows(on_host: bool) -> None:
    """Two peers and two dim-groups, of blocks that lie anywhere; both peers have one of them."""
    blocks = [[np.array([0, 2]), np.array([3])], [np.array([2]), np.array([], dtype=np.int64)]]
    rows = SyncList(blocks, 5 * 64, CPU)
    entries = row_bits.none_set(5 * 64, CPU)
    chosen = [1, 63, 2 * 64 + 5, 3 * 64, 3 * 64 + 63, 4 * 64]
    row_bits.mark(entries, torch.tensor([*chosen, 1, 5 * 64]))
    bits = rows.gather(entries)
    assert rows.words == [3, 1]
    lists = SumLists.of([(rows, [True, True]), (rows, [False, True])])
    expected = [1, 63, 2 * 64 + 5, 2 * 64 + 5, 3 * 64, 3 * 64 + 63, 3 * 64, 3 * 64 + 63]
    counts = [3, 1, 2, 0, 0, 0, 2, 0]
    if on_host:
        found, of_parts = lists.touched_in_host_memory([bits, bits])
    else:
        ordered, ones = lists.on_device([bits, bits])
        of_parts = ones.tolist()
        found = lists.touched_on_device(ordered, sum(counts))
    assert (found.tolist(), of_parts) == (expected, counts)
    assert [[peers for _, peers in part] for part in lists.by_part(found, counts)] == [
        [[3, 1], [2, 0]],
        [[0, 0], [2, 0]],
    ]
    assert [[some.tolist() for some, _ in part] for part in lists.by_part(found, counts)] == [
        [expected[:4], expected[4:6]], [[], expected[6:]],
    ]  # fmt: skip
    back = row_bits.none_set(5 * 64, CPU)
    row_bits.mark(back, torch.tensor([4 * 64 + 9]))
    rows.scatter(bits, back)
    assert row_bits.positions_of(back).tolist() == sorted({*expected, 4 * 64 + 9})


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_device_and_host_find_the_same_touched_rows(share: float) -> None:
    """Of three lists with up to four peers and three dim-groups, some left out, and blocks that are full of ones."""
    rng = np.random.default_rng(int(100 * share))
    lists, bits = [], []
    for peers in (4, 1, 3):
        blocks = [[rng.permutation(50)[: rng.integers(0, 4)] for _ in range(3)] for _ in range(peers)]
        rows = SyncList(blocks, 50 * 64, CPU)
        lists.append((rows, rng.integers(0, 2, 3).astype(bool).tolist()))
        bits.append(torch.from_numpy((rng.random(64 * sum(rows.words)) < share).astype(np.uint8)))
    found = SumLists.of(lists)
    words = [torch.from_numpy(np.packbits(some.numpy(), bitorder="little").view(np.int64)) for some in bits]
    on_host, counts = found.touched_in_host_memory(words)
    ordered, ones = found.on_device(bits)
    assert ones.tolist() == counts
    assert torch.equal(found.touched_on_device(ordered, sum(counts)), on_host)
    expected = []
    for (rows, kept), of_list in zip(lists, bits, strict=True):
        blocks_of_list = iter(of_list.view(-1, 64).numpy())
        by_peer = [[[next(blocks_of_list) for _ in part] for part in of_peer] for of_peer in rows.blocks]
        for group in range(3):
            for peer, of_peer in enumerate(rows.blocks):
                pairs = zip(of_peer[group], by_peer[peer][group], strict=True)
                expected.append(
                    [64 * block + at for block, word in pairs for at in np.flatnonzero(word) if kept[group]]
                )
    assert counts == list(map(len, expected))
    assert on_host.tolist() == [entry for part in expected for entry in part]
    assert sum(counts) > 0


def test_lists_are_kept_over_a_chunk_that_adds_no_block() -> None:
    """They are those of a directory that was listed anew, and rows of new blocks are in new lists."""
    layout = RankLayout(2, 2)
    tiers = np.where(np.arange(ROWS) % 3 == 0, Tier.DEVICE, Tier.HOME)
    stores = stores_of(layout, 0, tiers)
    router: Any = SimpleNamespace(hops=hops_of(layout, 0, direct=False))
    sync = ReplicaSync(stores, router, layout)
    kept = []
    for removed, keys in (([], [1]), ([0, 3], [4, 5]), ([], [key for key in range(1, 70) if key % 3 and key > 5])):
        before = sync.new_touched()
        new = np.array(keys, dtype=np.int64)
        stores[0].directory.change(
            np.array(removed, dtype=np.int64), new, np.zeros(len(new), np.int32),
            np.full(len(new), Tier.DEVICE, np.uint8),
        )  # fmt: skip
        after = sync.new_touched()
        assert before is not None
        assert after is not None
        kept.append(after.lists is before.lists)
        fresh = SyncLists.of(stores[0].directory, router.hops, layout)
        assert after.lists.first_entries == fresh.first_entries
        assert after.lists.used == fresh.used
        for mine, anew in ((after.lists.upstream, fresh.upstream), (after.lists.downstream, fresh.downstream)):
            assert [rows.index.tolist() for rows in mine] == [rows.index.tolist() for rows in anew]
            assert [rows.words for rows in mine] == [rows.words for rows in anew]
            assert [rows.nowhere for rows in mine] == [rows.nowhere for rows in anew]
    many = np.arange(ROWS, dtype=np.int64)
    old = sync.new_touched()
    listed = stores[0].directory.rows()[0]
    stores[0].directory.change(listed, many, np.zeros(ROWS, np.int32), np.full(ROWS, Tier.NODE, np.uint8))
    new_lists = sync.new_touched()
    assert old is not None
    assert new_lists is not None
    assert new_lists.lists is not old.lists
    fresh = SyncLists.of(stores[0].directory, router.hops, layout)
    assert [rows.index.tolist() for rows in new_lists.lists.upstream] == [
        rows.index.tolist() for rows in fresh.upstream
    ]
    assert kept == [True, True, True]
