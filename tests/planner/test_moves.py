"""Rows that move to other nodes beside copies: within the slots at every prefix, the most useful first."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import REHOMED, Delta, Placement, RankLayout, is_rehomed
from flexd.planner.affinity.outlook import rule_nodes
from flexd.planner.affinity.partition import NodeHomes
from flexd.planner.moves import MoveRoom, placed_homes, rehomed_placement, with_moves
from flexd.planner.plan import Plan
from flexd.planner.solver.assign import slots_used
from tests.support.planner_cases import ORIGIN

KEYSPACE = KeySpace([TableSpec("a", 60, 4), TableSpec("b", 40, 8), TableSpec("c", 20, 8, sharding="table_row_wise:0")])
ROWS = 120
LAYOUT = RankLayout(3, 2)


def some_homes(seed: int) -> NodeHomes:
    rng = np.random.default_rng(seed)
    keys = np.sort(rng.choice(ROWS, 70, replace=False)).astype(np.int64)
    home = rng.integers(0, LAYOUT.nodes, len(keys))
    return NodeHomes(keys, home, rng.random((len(keys), LAYOUT.nodes), dtype=np.float32), 0.0)


def some_placement(seed: int, rows: int, slots: list[int]) -> Placement:
    """Copies and re-homed rows that fit the slots."""
    rng = np.random.default_rng(seed)
    keys = np.sort(rng.choice(100, rows, replace=False)).astype(np.int64)
    tiers = rng.integers(1, 3, rows).astype(np.uint8)
    to = (rule_nodes(keys, LAYOUT) + rng.integers(1, LAYOUT.nodes, rows)) % LAYOUT.nodes
    tiers = np.where(rng.random(rows) < 0.5, REHOMED + to, tiers).astype(np.uint8)
    while bool((slots_used(keys, tiers, KEYSPACE, LAYOUT) > np.array(slots)[:, None]).any()):
        keys, tiers = keys[:-1], tiers[:-1]
    return Placement.of(keys, tiers, 3)


@given(st.integers(0, 10**6), st.lists(st.integers(0, 12), min_size=2, max_size=2))
def test_moves_fit_beside_the_copies_and_the_best_are_kept(seed: int, slots: list[int]) -> None:
    copies = some_placement(seed, 20, [30, 30]).copies
    homes = some_homes(seed)
    room = MoveRoom(KEYSPACE, LAYOUT, slots, copies, frozenset({"b"}))
    fitted = room.fit(homes)
    moved = rehomed_placement(fitted, LAYOUT)
    used, most = slots_used(moved.keys, moved.tiers, KEYSPACE, LAYOUT), np.array(slots)[:, None]
    assert (used <= most).all()
    assert not np.isin(moved.keys, copies.keys).any()
    assert set(KEYSPACE.table_of(moved.keys).tolist()) <= {0}, "not those excluded, nor with a rule of their own"
    rule = rule_nodes(homes.keys, LAYOUT)
    gain = homes.absent[np.arange(len(rule)), rule] - homes.absent[np.arange(len(rule)), homes.home]
    left_out = (homes.home != rule) & (fitted.home == rule) & (KEYSPACE.table_of(homes.keys) == 0)
    for at in np.flatnonzero(left_out & (copies.tiers_of(homes.keys) == 0)):
        rank = homes.home[at] * 2 + homes.keys[at] % 2
        rivals = (fitted.home != rule) & (fitted.home * 2 + homes.keys % 2 == rank)
        assert used[0, rank] == slots[0], "there was room"
        assert (gain[rivals] >= gain[at]).all(), "a better one was left out"
    again = room.fit_placement(moved)
    assert (again.keys.tolist(), again.tiers.tolist()) == (moved.keys.tolist(), moved.tiers.tolist())


@settings(deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(4, 30), min_size=2, max_size=2))
def test_every_prefix_of_a_plan_with_moves_fits(seed: int, slots: list[int]) -> None:
    halves = [number // 2 for number in slots]
    live, copies = some_placement(seed, 30, slots), some_placement(seed + 1, 30, halves).copies
    moved = MoveRoom(KEYSPACE, LAYOUT, halves, copies).fit_placement(some_placement(seed + 2, 30, slots).rehomed)
    rest: Any = [None] * 6
    plan = Plan(ORIGIN, copies, np.ones(len(copies)), Delta.empty(), *rest)
    made = with_moves(plan, moved, live, KEYSPACE, LAYOUT, slots, 1e-3)
    assert np.array_equal(made.target.copies.keys, copies.keys)
    between = is_rehomed(live.tiers_of(moved.keys)) & (live.tiers_of(moved.keys) != moved.tiers)
    assert np.array_equal(made.target.rehomed.keys, moved.keys[~between]), (
        "a row goes to a third node by way of its home"
    )
    assert made.moves_save_seconds == 1e-3
    old, new = made.delta.old_tiers, made.delta.new_tiers
    stored = np.array([16, 32, 32])[KEYSPACE.table_of(made.delta.keys)]
    copied = np.where((new < REHOMED) & (new > np.where(old < REHOMED, old, 0)), 1, 0)
    travels = copied + (old >= REHOMED) + (new >= REHOMED)
    assert made.row_bytes.sum() == (travels * stored).sum(), "to the new node, and back by way of home"
    placement, most = live, np.array(slots)[:, None]
    for chunk in made.delta.chunks(1 if len(made.delta) < 64 else 64):
        placement = placement.apply(chunk)
    assert np.array_equal(placement.keys, made.target.keys)
    assert np.array_equal(placement.tiers, made.target.tiers)
    placement = live
    for chunk in made.delta.chunks(64):  # blocks of a delta
        placement = placement.apply(chunk)
        assert (slots_used(placement.keys, placement.tiers, KEYSPACE, LAYOUT) <= most).all()


def test_placed_homes_are_those_of_the_placement() -> None:
    homes = some_homes(5)
    rule = rule_nodes(homes.keys, LAYOUT)
    at = np.flatnonzero(homes.home != rule)[:5]
    placed = placed_homes(homes, Placement.of(homes.keys[at], (REHOMED + homes.home[at]).astype(np.uint8)), LAYOUT)
    assert placed.home[at].tolist() == homes.home[at].tolist()
    others = np.setdiff1d(np.arange(len(rule)), at)
    assert placed.home[others].tolist() == rule[others].tolist()
