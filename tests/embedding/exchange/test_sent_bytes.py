"""Bytes that ranks send and accesses that they count, against formulas over the sets of ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Delta, Placement
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.jagged import Jagged
from tests.support.collection_jobs import ROWS, listed_by, offer, some, tables, train_step
from tests.support.rank_pool import RankPool


def count_bytes(rank: int, layout: RankLayout, exchange: str, delta: Delta, steps: int) -> list[dict[str, int]]:
    """Return the traffic of two empty look-ups, which agree on a chunk and apply it, and then of each step."""
    collection = EmbeddingCollection(tables("float32", ("item",)), layout=layout, exchange=exchange, replica_slots=[61])
    built = collection.traffic.totals()
    assert not any(built.values()), "construction is not training"
    offer(collection, delta)
    no_ids = {"item": Jagged(torch.arange(0), torch.tensor([0]))}
    with torch.no_grad():
        for _ in range(2):
            collection(no_ids)
    traffic = [collection.traffic.totals()]
    for step in range(steps):
        before = collection.traffic.totals()
        train_step(collection, {"item": some(0, step, rank)["item"]})
        collection.gather_table("item")
        collection.replicas_bit_equal()
        after = collection.traffic.totals()
        traffic.append({name: after[name] - before[name] for name in after})
    return traffic


Ranks = Callable[[int], RankPool]


ROW = 8 * 4


SIZES = 4 * 8
"""Bytes of the sizes for one peer: rows of the one dim-group, chunk version, fault, optimizer settings."""


def chain_bytes(layout: RankLayout, ids: list[set[int]], held: Callable[[int, int], bool]) -> np.ndarray:
    """Return int64 [ranks, 2]: intra- and inter-node bytes that each rank sends in one training step on the chain.

    Ids (8 bytes) and gradients go up, rows come down, and every rank sends the sizes to its peers of each hop.
    """
    sent = np.zeros((layout.world_size, 2), dtype=np.int64)
    requested_by: list[set[int]] = [set() for _ in ids]
    for rank, requested in enumerate(ids):
        node = layout.node_of(rank)
        sent[rank] += [(layout.local_ranks - 1) * SIZES, (layout.nodes - 1) * SIZES]
        for key in requested:
            owner = rank if held(rank, key) else layout.rank_of(node, key % layout.local_ranks)
            requested_by[owner].add(key)
            if owner != rank:
                sent[rank, 0] += 8 + ROW
                sent[owner, 0] += ROW
    for owner, requested in enumerate(requested_by):
        for key in requested:
            if not held(owner, key):
                sent[owner, 1] += 8 + ROW
                sent[key % layout.world_size, 1] += ROW
    return sent


def direct_bytes(layout: RankLayout, ids: list[list[int]], held: Callable[[int, int], bool]) -> np.ndarray:
    """Return the bytes like ``chain_bytes`` if every rank requests from the homes."""
    sent = np.zeros((layout.world_size, 2), dtype=np.int64)
    for rank, requested in enumerate(ids):
        far_ranks = layout.world_size - layout.local_ranks
        sent[rank] += [(layout.local_ranks - 1) * SIZES, far_ranks * SIZES]
        for key in requested:
            home = key % layout.world_size
            if not held(rank, key):
                far = int(layout.node_of(home) != layout.node_of(rank))
                sent[rank, far] += 8 + ROW
                sent[home, far] += ROW
    return sent


def sync_bytes(layout: RankLayout, placement: Placement, ids: list[set[int]], exchange: str) -> np.ndarray:
    """Return the bytes like ``chain_bytes``, for the synchronisation of replicas.

    On each hop a request carries one bit for each listed row that a peer serves, a response one bit for each listed row
    that this rank serves; then the gradients of the touched rows go up, and the sums come down.
    """
    sent = np.zeros((layout.world_size, 2), dtype=np.int64)
    nodes, local_ranks, world = layout.nodes, layout.local_ranks, layout.world_size
    tier_of = dict(zip(placement.keys.tolist(), placement.tiers.tolist(), strict=True))
    device = {key for key, tier in tier_of.items() if tier == Tier.DEVICE and world > 1}
    node = {key for key, tier in tier_of.items() if tier == Tier.NODE and nodes > 1}
    anywhere = set().union(*ids)

    def words(rows: set[int]) -> int:
        """Return the bytes of one bit a row; rows of each home and tier have words of their own."""
        rows_of = Counter((key % world, tier_of[key]) for key in rows)
        return sum(-(-count // 64) * 8 for count in rows_of.values())

    for rank in range(world):
        local, here = layout.local_rank_of(rank), layout.node_of(rank)

        def add_peer(
            peer: int, mine: set[int], its: set[int], up: set[int], rank: int = rank, here: int = here
        ) -> None:
            """Add the bytes of rows requested of the peer, of rows that it requests, and of rows touched here."""
            if peer == rank:
                return
            link = int(layout.node_of(peer) != here)
            sent[rank, link] += words(mine) + words(its) + ROW * (len(mine & up) + len(its & anywhere))

        if exchange != "chain":
            for peer in range(world):
                both = device | (node if layout.local_rank_of(peer) == local else set())
                on_rail = {key for key in both if key in device or key % local_ranks == local}
                mine, its = ({key for key in on_rail if key % world == other} for other in (peer, rank))
                add_peer(peer, mine, its, ids[rank])
            continue
        for peer in layout.node_ranks(here):
            mine, its = ({key for key in device if key % local_ranks == layout.local_rank_of(r)} for r in (peer, rank))
            add_peer(peer, mine, its, ids[rank])
        for peer in layout.rail_ranks(local):
            if peer != rank:
                bits = ({key for key in device | node if key % world == r} for r in (peer, rank))
                sent[rank, 1] += sum(map(words, bits))
        # All of the rail hold the rows of its homes, so the sums are all-reduced.
        reduced = ROW * sum(key % local_ranks == local for key in (device | node) & anywhere)
        sent[rank, 1] += 2 * reduced * (nodes - 1) // nodes
    return sent


def migration_bytes(layout: RankLayout, placement: Placement) -> np.ndarray:
    """Return the bytes like ``chain_bytes``, for promotions from HOME.

    A rank sends its rows to each other one of its rail, and DEVICE rows to each of its node.
    """
    sent = np.zeros((layout.world_size, 2), dtype=np.int64)
    device = placement.keys[placement.tiers == Tier.DEVICE]
    in_node = np.bincount(device % layout.local_ranks, minlength=layout.local_ranks)
    for rank in range(layout.world_size):
        rail = placement.keys[placement.keys % layout.local_ranks == layout.local_rank_of(rank)]
        over_rail = np.bincount(layout.home_node(rail), minlength=layout.nodes)
        rows = [in_node[layout.local_rank_of(rank)], over_rail[layout.node_of(rank)]]
        sent[rank] = [rows[0] * ROW * (layout.local_ranks - 1), rows[1] * ROW * (layout.nodes - 1)]
    return sent


@pytest.mark.parametrize("exchange", ["chain", "direct"])
@pytest.mark.parametrize(("nodes", "local_ranks"), [(2, 2), (2, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("replicas", [0, 25])
def test_bytes_and_accesses_equal_those_of_the_id_sets(
    ranks: Ranks, nodes: int, local_ranks: int, exchange: str, replicas: int
) -> None:
    layout = RankLayout(nodes, local_ranks)
    rng = np.random.default_rng(6)
    placement = Placement.of(rng.permutation(ROWS["item"])[:replicas], rng.integers(1, 3, replicas).astype(np.uint8))
    listed = [listed_by(layout, rank, placement) for rank in range(layout.world_size)]
    tier_of = [dict(zip(p.keys.tolist(), p.tiers.tolist(), strict=True)) for p in listed]

    def held(rank: int, key: int) -> bool:
        return key % layout.world_size == rank or key in tier_of[rank]

    delta = Placement.empty().delta_to(placement)
    results = ranks(layout.world_size).run(count_bytes, layout, exchange, delta, 3)
    copied = [result[0] for result in results]
    assert [[s["migration_intra_bytes"], s["migration_inter_bytes"]] for s in copied] == migration_bytes(
        layout, placement
    ).tolist()
    assert not any(s["sync_intra_bytes"] + s["sync_inter_bytes"] for s in copied)
    for step in range(3):
        ids = [some(0, step, rank)["item"].values.tolist() for rank in range(layout.world_size)]
        if exchange == "chain":
            expected = chain_bytes(layout, [set(requested) for requested in ids], held)
        else:
            expected = direct_bytes(layout, [sorted(set(requested)) for requested in ids], held)
        synced = sync_bytes(layout, placement, [set(requested) for requested in ids], exchange)
        traffic = [result[step + 1] for result in results]
        for kind, counted in (("all_to_all", expected), ("sync", synced)):
            assert [[s[f"{kind}_intra_bytes"], s[f"{kind}_inter_bytes"]] for s in traffic] == counted.tolist()
        assert not any(s["migration_intra_bytes"] + s["migration_inter_bytes"] for s in traffic)
        everything = [key for requested in ids for key in requested]
        whole = dict(zip(placement.keys.tolist(), placement.tiers.tolist(), strict=True))
        for tier in Tier:
            counted_tier = tier if (tier != Tier.NODE or nodes > 1) else None
            count = sum(
                (whole.get(key, 0) if nodes > 1 or whole.get(key, 0) != Tier.NODE else 0) == counted_tier
                for key in everything
            )
            assert sum(s[f"{tier.name.lower()}_accesses"] for s in traffic) == count
