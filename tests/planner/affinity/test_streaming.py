"""Homes learnt live from the co-access sample: groups are found, moves pay, and the outlook says what it knows."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.planner.affinity.outlook import FORGOTTEN_AFTER, AffinityOutlook, plan_affinity, rule_nodes, users_of_window
from flexd.planner.affinity.window import SampledWindow, SampleRows, row_costs, sampled_window, sorted_distinct
from flexd.sketch.coaccess import NO_USER, CoAccess, CoAccessSample

LAYOUT = RankLayout(2, 4)
GROUPS, GROUP_ROWS, SIZE = 16, 40, 64
KEYSPACE = KeySpace(
    [TableSpec("items", GROUPS * GROUP_ROWS, 16), TableSpec("users", GROUPS, 16), TableSpec("wide", 50, 128)]
)


def sampled(batches: int, seed: int = 0, first_group: int = 0, memory: int = 1 << 22) -> CoAccess:
    """Samples of twelve items and a user of one group each, after their id; batch by batch."""
    random = np.random.default_rng(seed)
    sample = CoAccessSample([spec.rows for spec in KEYSPACE.tables], memory, None)
    for batch in range(batches):
        ids = np.arange(SIZE) + batch * SIZE + seed * 100_000
        group = first_group + random.integers(0, GROUPS - first_group, SIZE)
        mixed = np.random.default_rng(5).permutation(GROUPS * GROUP_ROWS)
        rows = mixed[group[:, None] * GROUP_ROWS + random.integers(0, GROUP_ROWS, (SIZE, 12))].reshape(-1)
        time = float(batch + seed * 100)
        sample.add(0, rows, np.full(SIZE, 12, dtype=np.int32), 0, time, None, ids)
        sample.add(1, group, np.ones(SIZE, dtype=np.int32), 1, time, None, ids, group + 1_000)
    return sample.read([spec.name for spec in KEYSPACE.tables])


def window_of(batches: int, horizon: float = 100.0, **options: int) -> SampledWindow:
    return sampled_window(sampled(batches, **options), KEYSPACE, horizon_steps=horizon, batch_samples=SIZE)


def test_tables_of_a_sample_are_joined_and_the_newest_batches_are_whole() -> None:
    window = sampled_window(sampled(5), KEYSPACE, horizon_steps=100.0, accesses_per_step=13.0 * 50)
    assert (window.batch_samples, window.batches) == (50, 6)
    assert np.bincount(window.batch).tolist() == [50] * 6
    table = KEYSPACE.table_of(window.rows.keys[window.rows.rows])
    assert (np.bincount(window.rows.samples[table == 1], minlength=len(window.rows)) == 1).all()
    assert (window.user != NO_USER).any()


def test_tables_with_a_sharding_type_of_their_own_stay_out() -> None:
    tables = [
        dataclasses.replace(spec, sharding="table_wise:0" if spec.name == "users" else spec.sharding)
        for spec in KEYSPACE.tables
    ]
    window = sampled_window(sampled(2), KeySpace(tables), horizon_steps=1.0, batch_samples=SIZE)
    assert set(KeySpace(tables).table_of(window.rows.keys).tolist()) == {0}


def test_planted_groups_are_found_and_priced() -> None:
    plan = plan_affinity(window_of(40), LAYOUT)
    loader, dealing = plan.forecast.loader, plan.forecast.dealing_loader
    assert loader.low <= loader.expected <= loader.high
    assert loader.expected < 0.25
    assert dealing.expected > loader.expected + 0.1, "moved homes win beside dealing"
    assert plan.forecast.pays
    assert plan.forecast.moves_pay
    assert np.array_equal(plan.moves, plan.homes.keys[plan.homes.home != rule_nodes(plan.homes.keys, LAYOUT)])
    stored = np.array([spec.row_bytes + spec.state_bytes for spec in KEYSPACE.tables])
    assert plan.forecast.move_bytes == stored[KEYSPACE.table_of(plan.moves)].sum()
    assert plan.users.ids.tolist() == list(range(1_000, 1_000 + GROUPS))
    assert plan.forecast.chain_bytes > 0


def test_users_are_where_their_rows_live() -> None:
    before = plan_affinity(window_of(40), LAYOUT)
    moved = plan_affinity(window_of(40, seed=1), LAYOUT, before, in_place=True)
    by_rule = plan_affinity(window_of(40, seed=1), LAYOUT, before)
    # A user is a group: her node is that of most of the group's rows.
    mixed = np.random.default_rng(5).permutation(GROUPS * GROUP_ROWS).reshape(GROUPS, GROUP_ROWS)
    node = moved.homes.home_of(mixed.reshape(-1), rule_nodes(mixed.reshape(-1), LAYOUT)).reshape(mixed.shape)
    most = np.array([np.bincount(each, minlength=2).argmax() for each in node])
    assert np.array_equal(moved.users.node_of(1_000 + np.arange(GROUPS)), most)
    assert moved.forecast.by_user.expected < 0.3, "with rows in their node"
    assert by_rule.forecast.by_user.expected > 0.6, "with rows where their rule puts them"
    rule = dataclasses.replace(by_rule.homes, home=rule_nodes(by_rule.homes.keys, LAYOUT))
    assert np.array_equal(by_rule.users.nodes_of, users_of_window(window_of(40, seed=1), rule, LAYOUT).nodes_of)
    messages = AffinityOutlook.of(moved, 2_560).messages
    assert any("With each user's samples in her node (flexd affinity users -o FILE.npz)" in each for each in messages)


def test_learnt_on_homes_stay_and_only_what_pays_moves() -> None:
    first = plan_affinity(window_of(40), LAYOUT)
    again = plan_affinity(window_of(40, seed=1, horizon=1.0), LAYOUT, first, in_place=True)
    assert again.continued
    assert len(again.moves) < 0.1 * len(first.moves)
    # A new division that wins more than its moves over a long horizon.
    assert not plan_affinity(window_of(40, seed=1, horizon=1e6), LAYOUT, first, in_place=True).continued
    # A horizon too short for any move.
    dear = plan_affinity(window_of(40, seed=1, horizon=1e-3), LAYOUT, first, in_place=True)
    assert len(dear.moves) == 0
    assert dear.forecast.move_bytes == 0


def test_rehomed_rows_that_are_not_seen_any_more_stay_for_a_while() -> None:
    plan = first = plan_affinity(window_of(40), LAYOUT)
    gone = np.setdiff1d(first.homes.keys, window_of(40, seed=2, first_group=GROUPS // 2).rows.keys)
    moved = gone[first.homes.home_of(gone, rule_nodes(gone, LAYOUT)) != rule_nodes(gone, LAYOUT)]
    assert len(moved)
    for _ in range(FORGOTTEN_AFTER - 1):
        plan = plan_affinity(window_of(40, seed=2, first_group=GROUPS // 2), LAYOUT, plan, in_place=True)
        before = first.homes.home_of(moved, rule_nodes(moved, LAYOUT))
        assert np.array_equal(plan.homes.home_of(moved, rule_nodes(moved, LAYOUT)), before)
        assert (np.diff(plan.homes.keys) > 0).all()
    plan = plan_affinity(window_of(40, seed=2, first_group=GROUPS // 2), LAYOUT, plan, in_place=True)
    assert not np.isin(moved, plan.homes.keys).any()


@pytest.mark.parametrize("seed", range(3, 9))
def test_nodes_are_level_in_rows_bytes_and_load(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = SampleRows.of(np.repeat(np.arange(2_000), 8), np.minimum(random.zipf(1.3, 16_000), 700) - 1)
    keys = KeySpace([TableSpec("narrow", 600, 4), TableSpec("wide", 200, 256)])
    keyed = dataclasses.replace(rows, keys=np.sort(random.permutation(800)[: len(rows.keys)]))
    wire, costs = row_costs(keys, keyed.keys, 1e6)
    window = SampledWindow(keyed, np.full(2_000, NO_USER), np.arange(2_000) // 100, 100, wire, costs)
    homes = plan_affinity(window, LAYOUT).homes
    rule = rule_nodes(homes.keys, LAYOUT)
    for weight in (np.ones(len(homes.keys)), costs.stored_bytes.astype(np.float64)):
        now, was = (np.bincount(of, weight, 2) for of in (homes.home, rule))
        assert (now <= np.maximum(1.05 * weight.sum() / 2, was) + weight.max()).all()


def test_a_small_catalogue_is_not_here_and_a_small_sample_is_not_known() -> None:
    random = np.random.default_rng(1)
    sample = CoAccessSample([GROUPS * GROUP_ROWS, GROUPS, 50], 1 << 22, None)
    for batch in range(20):
        sample.add(2, random.integers(0, 12, 256 * 16), np.full(256, 16, dtype=np.int32), 0, float(batch), batch)
    read = sample.read([spec.name for spec in KEYSPACE.tables])
    plan = plan_affinity(sampled_window(read, KEYSPACE, horizon_steps=100.0, batch_samples=256), LAYOUT)
    assert not plan.forecast.pays
    assert AffinityOutlook.of(plan, read.samples).messages[0].startswith("No gain expected")
    few = plan_affinity(window_of(3), LAYOUT)
    assert few.forecast.loader is None
    assert not few.forecast.pays
    assert (
        AffinityOutlook.of(few, 192).messages[0].startswith("Affinity is not known: 192 samples are held, at least 256")
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10**12)), max_size=60))
def test_samples_of_any_keys_are_numbered_alike(accesses: list[tuple[int, int]]) -> None:
    samples = np.array([sample for sample, _ in accesses], dtype=np.int64)
    for keys in (
        np.array([key for _, key in accesses], dtype=np.int64),
        np.array([key % 50 for _, key in accesses], dtype=np.int64),
    ):
        made = SampleRows.of(samples, keys, 10)
        assert np.array_equal(made.keys, np.unique(keys))
        assert np.array_equal(sorted_distinct(keys), np.unique(keys))
        for sample in range(10):
            rows = made.keys[made.rows[made.offsets[sample] : made.offsets[sample + 1]]]
            assert rows.tolist() == sorted(set(keys[samples == sample].tolist()))
