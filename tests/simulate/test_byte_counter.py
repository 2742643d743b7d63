"""Bytes of a step against a slow, obvious count with Python sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.planner.model.row_bytes import Exchange
from flexd.simulate.byte_counter import StepByteCounter, StepPart, sent_bytes
from flexd.simulate.step_keys import StepPasses

KEYSPACE = KeySpace([TableSpec("a", 13, 4), TableSpec("b", 9, 3, "float64"), TableSpec("c", 5, 4)])
ROW_BYTES = [16] * 18 + [24] * 9
"""By key: tables a and c share a dim-group, b comes after them."""


def slow_count(keys: list[list[int]], layout: RankLayout, tiers: dict[int, int], exchange: Exchange) -> np.ndarray:
    """int64 [ranks, parts, 2] without the sizes exchange: every request carried out one by one."""
    world, local, nodes = layout.world_size, layout.local_ranks, layout.nodes
    sent = np.zeros((world, len(StepPart), 2), dtype=np.int64)

    def send(source: int, target: int, key: int) -> None:
        if source == target:
            return
        link = int(source // local != target // local)
        sent[source, StepPart.IDS, link] += 8
        sent[target, StepPart.FORWARD, link] += ROW_BYTES[key]
        sent[source, StepPart.BACKWARD, link] += ROW_BYTES[key]

    if exchange is Exchange.CHAIN:
        for node in range(nodes):
            at_owner: dict[int, set[int]] = {}
            for rank in layout.node_ranks(node):
                for key in set(keys[rank]):
                    owner = layout.rank_of(node, key % local)
                    tier = tiers.get(key, 0)
                    if key % world == rank or (tier == Tier.DEVICE and world > 1):
                        continue
                    if tier == Tier.NODE and nodes > 1 and owner == rank:
                        continue
                    send(rank, owner, key)
                    at_owner.setdefault(owner, set()).add(key)
            for owner, wanted in at_owner.items():
                for key in wanted:
                    if key % world != owner and tiers.get(key, 0) == Tier.HOME:
                        send(owner, key % world, key)
    else:
        for rank in range(world):
            for key in set(keys[rank]) if exchange is Exchange.DIRECT_DEDUP else keys[rank]:
                tier, target = tiers.get(key, 0), key % world
                if tier == Tier.DEVICE:
                    target = rank
                if tier == Tier.NODE and nodes > 1:
                    target = layout.rank_of(rank // local, key % local)
                send(rank, target, key)
    return sent


@settings(max_examples=150, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (2, 3)]),
    exchange=st.sampled_from(list(Exchange)),
    data=st.data(),
)
def test_every_request_is_counted_once(shape: tuple[int, int], exchange: Exchange, data: st.DataObject) -> None:
    layout = RankLayout(*shape)
    key = st.integers(0, KEYSPACE.total_rows - 1)
    keys = [data.draw(st.lists(key, max_size=25)) for _ in range(layout.world_size)]
    tiers = data.draw(st.dictionaries(key, st.sampled_from([1, 2]), max_size=12))
    placement = Placement.of(np.array(list(tiers), dtype=np.int64), np.array(list(tiers.values()), dtype=np.uint8))
    step = StepPasses.of([[np.array(mine, dtype=np.int64) for mine in keys]], layout)
    assert step.whole.accesses == sum(map(len, keys))
    counter = StepByteCounter(KEYSPACE, layout)
    collectives = counter.step(step, placement, exchange)
    sent = sent_bytes(
        [c for c in collectives if c.part not in (StepPart.SYNC_MASK, StepPart.SYNC_ROWS)], layout.world_size
    )
    expected = slow_count(keys, layout, tiers, exchange)
    # Sizes: 8 bytes a dim-group and 24 more, to every other rank of each hop.
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    each = 8 * (len(KEYSPACE.groups) + 3)
    expected[:, StepPart.IDS, 0] += each * (local - 1)
    expected[:, StepPart.IDS, 1] += each * ((nodes - 1) if exchange is Exchange.CHAIN else (world - local))
    np.testing.assert_array_equal(sent, expected)
    for one in collectives:
        assert (one.peak >= one.sent.max(axis=0)).all()


def test_what_two_nodes_ask_of_one_home_makes_its_peak() -> None:
    layout = RankLayout(3, 1)
    keys = [np.array([0], dtype=np.int64), np.array([0, 3], dtype=np.int64), np.array([0], dtype=np.int64)]
    step = StepPasses.of([keys], layout)
    rows = next(
        c
        for c in StepByteCounter(KEYSPACE, layout).step(step, Placement.empty(), Exchange.CHAIN)
        if c.part is StepPart.FORWARD
    )
    # Rank 0 is home of both rows: it sends three of 16 bytes, nobody receives as many.
    assert rows.sent[:, 1].tolist() == [48, 0, 0]
    assert rows.peak.tolist() == [0, 48]
