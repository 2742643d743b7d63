"""Touched rows compared with sets: all ranks of an exchange in one process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import DimGroup
from flexd.core.layout import RankLayout, Tier
from flexd.embedding import devices
from flexd.embedding.exchange.hop import Hop, PeerWords
from flexd.embedding.replicas import row_bits
from flexd.embedding.replicas.replica_sync import ReplicaSync
from flexd.embedding.replicas.sum_lists import SumLists
from flexd.embedding.replicas.touched_rows import SyncList, SyncLists, TouchedRows
from flexd.embedding.store.directory import Directory
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


class Rank:
    def __init__(self, layout: RankLayout, rank: int, tiers: np.ndarray, requested: set[int], *, direct: bool) -> None:
        self.layout = layout
        self.rank = rank
        self.stores = stores_of(layout, rank, tiers)
        self.hops = hops_of(layout, rank, direct=direct)
        self.touched = TouchedRows(SyncLists.of(self.stores[0].directory, self.hops, layout), CPU)
        self.requested = requested

    def pass_station(self) -> None:
        """Add the requested rows that this rank holds, and keep the others."""
        missing: set[int] = set()
        for store in self.stores:
            keys = torch.tensor(sorted(k for k in self.requested if store.group.first_key <= k < store.group.end_key))
            held, _, entries = store.locate(keys.to(torch.int64))
            listed = held & (entries >= 0)
            self.touched.add(entries[listed])
            missing |= set(keys[~held].tolist())
        self.requested = missing

    def listed(self, keys: set[int]) -> set[int]:
        return set(self.directory.rows()[0].tolist()) & keys

    def marked(self, touched: TouchedRows) -> set[int]:
        keys = self.directory.rows()[0]
        of_entries = dict(zip(self.directory.find(torch.from_numpy(keys)).tolist(), keys.tolist(), strict=True))
        found = {of_entries[entry] for group in range(2) for entry in touched.entries_of_group(group).tolist()}
        assert found == {of_entries[entry] for entry in touched.all_positions().tolist()}
        return found

    @property
    def directory(self) -> Directory:
        return self.stores[0].directory


def deliver(world: list[Rank], hop: int, words: list[PeerWords]) -> list[torch.Tensor]:
    """Exchange the words over a hop, all to all."""
    sent = {}
    for one, mine in zip(world, words, strict=True):
        for peer, part in zip(one.hops[hop].peers.ranks, torch.split(mine.words, list(mine.sent)), strict=True):
            sent[one.rank, peer] = part
    received = []
    for one, mine in zip(world, words, strict=True):
        parts = [sent[peer, one.rank] for peer in one.hops[hop].peers.ranks]
        assert [len(part) for part in parts] == list(mine.received)
        received.append(torch.cat(parts))
    return received


def agree(layout: RankLayout, tiers: np.ndarray, requested: list[set[int]], *, direct: bool) -> list[Rank]:
    world = [Rank(layout, rank, tiers, keys, direct=direct) for rank, keys in enumerate(requested)]
    hops = len(world[0].hops)
    for hop in range(hops):
        for one in world:
            one.pass_station()
        for one, words in zip(world, deliver(world, hop, [one.touched.up(hop) for one in world]), strict=True):
            one.touched.recv_up(hop, words)
        moved: list[set[int]] = [set() for _ in world]
        for one in world:
            peers = one.hops[hop].peers.ranks
            for key in one.requested:
                moved[peers[int(one.hops[hop].destination(torch.tensor([key % layout.world_size])))]].add(key)
        for one, keys in zip(world, moved, strict=True):
            one.requested = keys
    for one in world:
        one.pass_station()
        assert one.requested == set(), "the home holds every row"
        assert one.touched.complete == (hops == 0)
    for hop in reversed(range(hops)):
        for one, words in zip(world, deliver(world, hop, [one.touched.down(hop) for one in world]), strict=True):
            one.touched.recv_down(hop, words)
    return world


layouts = st.sampled_from([RankLayout(1, 1), RankLayout(1, 3), RankLayout(2, 1), RankLayout(2, 2), RankLayout(3, 2)])


@settings(max_examples=40, deadline=None)
@given(
    layout=layouts,
    seed=st.integers(0, 999),
    density=st.sampled_from([0.02, 0.3, 1.0]),
    tier=st.integers(-1, 2),
    direct=st.booleans(),
)
def test_every_rank_receives_the_rows_that_any_rank_touches(
    layout: RankLayout, seed: int, density: float, tier: int, direct: bool
) -> None:
    rng = np.random.default_rng(seed)
    tiers = rng.integers(0, 3, ROWS) if tier < 0 else np.full(ROWS, tier)
    passes, ranks = [], []
    for _ in range(2):
        requested = [
            set(np.flatnonzero(rng.random(ROWS) < density * rng.random()).tolist()) for _ in range(layout.world_size)
        ]
        ranks = agree(layout, tiers, requested, direct=direct)
        for one in ranks:
            assert one.touched.complete
            assert one.marked(one.touched) == one.listed(set().union(*requested))
        passes.append((requested, [one.touched for one in ranks]))
    (first, of_first), (second, of_second) = passes
    either, both = set().union(*first, *second), set().union(*first) & set().union(*second)
    for one, a, b in zip(ranks, of_first, of_second, strict=True):
        assert one.marked(TouchedRows.union([a, b])) == one.listed(either)
        shared, rest = a.split(b)
        assert one.marked(shared) == one.listed(both)
        assert one.marked(rest) == one.listed(set().union(*first) - both)
        assert shared.complete
        assert rest.complete
        for part, whole in ((shared, a), (rest, a)):
            for bits, of_whole in zip(
                [*part.up_sent, *part.up_received, *part.down_sent, *part.down_received],
                [*whole.up_sent, *whole.up_received, *whole.down_sent, *whole.down_received],
                strict=True,
            ):
                assert torch.equal(bits | of_whole, of_whole)


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
