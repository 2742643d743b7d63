"""Touched rows compared with sets: all ranks of an exchange in one process."""

from __future__ import annotations

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
from flexd.embedding.replicas.touched_rows import SyncList, SyncLists, TouchedRows, positions_of
from flexd.embedding.store.store import GroupStore

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
    stores = [GroupStore(group, layout, rank, ROWS, CPU) for group in GROUPS]
    for store in stores:
        keys = np.arange(store.group.first_key, store.group.end_key)
        on_rail = (tiers[keys] == Tier.NODE) & (keys % layout.local_ranks == layout.local_rank_of(rank))
        listed = keys[(on_rail & (layout.nodes > 1)) | ((tiers[keys] == Tier.DEVICE) & (layout.world_size > 1))]
        store.directory = store.directory.replace(
            torch.empty(0, dtype=torch.int64),
            torch.from_numpy(listed),
            torch.arange(len(listed), dtype=torch.int32),
            torch.from_numpy(tiers[listed].astype(np.uint8)),
        )
    return stores


class Rank:
    def __init__(self, layout: RankLayout, rank: int, tiers: np.ndarray, requested: set[int], *, direct: bool) -> None:
        self.layout = layout
        self.rank = rank
        self.stores = stores_of(layout, rank, tiers)
        self.hops = hops_of(layout, rank, direct=direct)
        self.touched = TouchedRows(SyncLists.of(self.stores, self.hops, layout), CPU)
        self.requested = requested

    def pass_station(self) -> None:
        """Add the requested rows that this rank holds, and keep the others."""
        missing: set[int] = set()
        for group, store in enumerate(self.stores):
            keys = torch.tensor(sorted(k for k in self.requested if store.group.first_key <= k < store.group.end_key))
            held, _, positions = store.locate(keys.to(torch.int64))
            listed = held & (positions >= 0)
            self.touched.add(positions[listed] + self.touched.lists.first_entries[group])
            missing |= set(keys[~held].tolist())
        self.requested = missing

    def listed(self, keys: set[int]) -> set[int]:
        return {key for store in self.stores for key in store.directory.keys.tolist()} & keys

    def marked(self, touched: TouchedRows) -> set[int]:
        return {
            key
            for group, store in enumerate(self.stores)
            for key in store.directory.keys[touched.positions(group)].tolist()
        }


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
                assert bool((bits <= of_whole).all())


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("chosen", [None, torch.tensor([2, 3, 4, 9, 10], dtype=torch.int32)])
def test_a_list_gathers_and_scatters_its_rows(chosen: torch.Tensor | None, host: bool) -> None:
    """Two peers and two dim-groups; the bits of each peer fill a word."""
    rows = SyncList([[(0, 2), (4, 5)], [(1, 2), (5, 5)]], chosen, True, 11, CPU)
    entries = torch.zeros(12, dtype=torch.uint8)
    entries[[1, 2, 3, 4, 9, 10]] = 1
    at = torch.arange(12) if chosen is None else chosen.to(torch.int64)
    with mock.patch.object(devices, "in_host_memory", return_value=host):
        bits = rows.gather(entries)
    assert rows.words == [1, 1]
    assert len(bits) == 128
    requested = [[0, 1, 4], [1]]
    for peer, of_peer in enumerate(requested):
        part = bits[64 * peer : 64 * peer + 64]
        assert part[: len(of_peer)].tolist() == entries[at[of_peer]].tolist()
        assert not part[len(of_peer) :].any()
    counts = rows.counts(bits)
    assert sum(counts) == int(bits.sum())
    expected = [int(at[place]) for of_peer in requested for place in of_peer if entries[at[place]]]
    assert rows.entries_of(bits, counts).tolist() == expected
    back = torch.zeros_like(entries)
    with mock.patch.object(devices, "in_host_memory", return_value=host):
        rows.scatter(bits, back)
    assert positions_of(back).tolist() == sorted(set(expected))
    second, of_second = rows.of_groups([False, True], bits)
    assert second.entries_of(of_second, second.counts(of_second)).tolist() == [int(at[4])] * int(entries[at[4]])
