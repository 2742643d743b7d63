"""Deltas: every prefix fits, the best rows first; chunks respect their limits."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.planner.plan import delta_chunks, moved_bytes, plan_delta
from flexd.planner.solver.assign import slots_used

KEYSPACE = KeySpace(
    [TableSpec("a", 1500, 8), TableSpec("b", 700, 16, optimizer="rowwise_adagrad"), TableSpec("c", 800, 8)]
)


def random_placement(rng: np.random.Generator, layout: RankLayout, slots: np.ndarray, rows: int) -> Placement:
    """A placement that fits: rows are added in random order as long as their prefix does."""
    keys = rng.permutation(KEYSPACE.total_rows)[:rows].astype(np.int64)
    tiers = rng.integers(1, 3, rows).astype(np.uint8)
    fits = [n for n in range(rows + 1) if (slots_used(keys[:n], tiers[:n], KEYSPACE, layout) <= slots[:, None]).all()]
    return Placement.of(keys[: fits[-1]], tiers[: fits[-1]])


cases = st.tuples(
    st.integers(0, 2**32 - 1),
    st.sampled_from([RankLayout(2, 2), RankLayout(3, 2), RankLayout(1, 3), RankLayout(3, 1)]),
    st.integers(0, 250),
)


@settings(max_examples=25, deadline=None)
@given(cases)
def test_every_prefix_fits_and_ends_at_the_plan(case: tuple[int, RankLayout, int]) -> None:
    seed, layout, rows = case
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, 120, 2)
    live, target = (random_placement(rng, layout, slots, rows) for _ in range(2))
    # Most rows live on, so that demotions and promotions mix.
    gains = rng.exponential(1.0, len(target))
    delta = plan_delta(live, target, gains, KEYSPACE, layout, slots.tolist())
    assert len(np.unique(delta.keys)) == len(delta)
    placement = live
    for chunk in delta_chunks(delta, KEYSPACE, layout, int(rng.integers(1, 40)), int(rng.integers(1, 4000))):
        placement = placement.apply(chunk)
        assert (slots_used(placement.keys, placement.tiers, KEYSPACE, layout) <= slots[:, None]).all()
    assert np.array_equal(placement.keys, target.keys)
    assert np.array_equal(placement.tiers, target.tiers)
    change = np.zeros((2, layout.world_size), np.int64) + slots_used(live.keys, live.tiers, KEYSPACE, layout)
    for i in range(len(delta)):
        one = delta.select(slice(i, i + 1))
        change = change + slots_used(one.keys, one.new_tiers, KEYSPACE, layout)
        change = change - slots_used(one.keys, one.old_tiers, KEYSPACE, layout)
        assert (change <= slots[:, None]).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 50), st.integers(1, 3000))
def test_chunks_keep_their_limits(seed: int, most_rows: int, most_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    layout = RankLayout(2, 2)
    live, target = (random_placement(rng, layout, np.array([60, 60]), 100) for _ in range(2))
    delta = plan_delta(live, target, np.ones(len(target)), KEYSPACE, layout, [60, 60])
    chunks = list(delta_chunks(delta, KEYSPACE, layout, most_rows, most_bytes))
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *(c.keys for c in chunks)]), delta.keys)
    sizes = [int(moved_bytes(c, KEYSPACE, layout).sum()) for c in chunks]
    for i, chunk in enumerate(chunks):
        assert 1 <= len(chunk) <= most_rows
        assert sizes[i] <= most_bytes or len(chunk) == 1
        if i + 1 < len(chunks):
            more = int(moved_bytes(chunks[i + 1].select(slice(0, 1)), KEYSPACE, layout).sum())
            assert len(chunk) == most_rows or sizes[i] + more > most_bytes


def test_the_best_rows_per_byte_come_first_and_demotions_late() -> None:
    layout = RankLayout(2, 1)
    live = Placement.of(np.arange(0, 200), np.full(200, Tier.NODE, np.uint8))
    keys = np.concatenate([np.arange(400, 600), np.arange(2400, 2600)])
    gains = np.random.default_rng(0).permutation(400).astype(np.float64)
    target = Placement.of(keys, np.full(400, Tier.NODE, np.uint8))
    gains = gains[np.argsort(np.argsort(keys))]
    # 100 live rows fill each rank of the first dim-group; there is room for another 40.
    delta = plan_delta(live, target, gains, KEYSPACE, layout, [140, 200])
    up = delta.new_tiers > delta.old_tiers
    promoted = delta.select(np.flatnonzero(up))
    density = gains[np.searchsorted(target.keys, promoted.keys)] / moved_bytes(promoted, KEYSPACE, layout)
    assert (np.diff(density) <= 0).all()
    first_demotion = int(np.argmin(up))
    assert first_demotion > 0, "room was free, so promotions need not wait"
    assert up[first_demotion:].any(), "demotions are not put off to the end either"


def test_moved_bytes() -> None:
    layout = RankLayout(2, 2)
    live = Placement.of(np.array([0, 1, 2200]), np.array([Tier.DEVICE, Tier.NODE, Tier.NODE], np.uint8))
    target = Placement.of(np.array([0, 1, 2, 2500]), np.array([Tier.NODE, Tier.DEVICE, Tier.NODE, Tier.NODE], np.uint8))
    delta = live.delta_to(target)
    moved = dict(zip(delta.keys.tolist(), moved_bytes(delta, KEYSPACE, layout).tolist(), strict=True))
    payload = [t.row_bytes + t.state_bytes for t in (KEYSPACE.tables[g.tables[0]] for g in KEYSPACE.groups)]
    assert moved == {0: 0, 1: payload[0], 2: payload[0], 2200: 0, 2500: payload[KEYSPACE.group_of(np.array([2500]))[0]]}
