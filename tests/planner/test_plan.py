"""make_plan from a profile to a plan and its summary."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core import units
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.planner.model.prices import Exchange
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import Plan, PlanCosts, delta_chunks, make_plan, moved_bytes, placement_cost, plan_delta
from flexd.planner.solver.assign import slots_used
from flexd.sketch.profile import Profile
from flexd.topology.cluster import CollectiveCurve, WorldModel
from flexd.topology.files import load_preset
from tests.support.planner_cases import ORIGIN, cluster, group_cost, load, profile

KEYSPACE = KeySpace([TableSpec("items", 5000, 16), TableSpec("users", 3000, 32, optimizer="rowwise_adagrad")])
LAYOUT = RankLayout(2, 2)
ACCESSES = 20_000.0


def plan(
    seen: Profile, live: Placement | None = None, *, slots: tuple[int, ...] = (200, 100), horizon: float = 1e4, **kwargs
) -> Plan:
    return make_plan(
        seen,
        KEYSPACE,
        kwargs.pop("layout", LAYOUT),
        kwargs.pop("machine", cluster()),
        slots,
        live or Placement.empty(),
        ORIGIN,
        horizon_steps=horizon,
        **kwargs,
    )


def test_a_plan_says_everything() -> None:
    made = plan(profile(KEYSPACE, ACCESSES, hot=800))
    summary = json.loads(json.dumps(made.summary, allow_nan=False))
    assert {name: summary[name] for name in ("plan_id", "parent_id", "topology_generation", "profile_generation")} == {
        "plan_id": "p2", "parent_id": "p1", "topology_generation": 4, "profile_generation": 3,
    }  # fmt: skip
    assert summary["promotions"] == len(made.target) > 0
    assert sum(summary["rows"].values()) == len(made.target)
    assert summary["after"]["exposed_seconds"] < summary["before"]["exposed_seconds"]
    assert summary["before"]["exposed_seconds"] == pytest.approx(summary["baselines"]["two_hop"]["exposed_seconds"])
    assert 0 <= summary["gap"] < 0.01
    assert summary["lower_bound_seconds"] <= summary["objective_seconds"]
    assert summary["migration_bytes"] == np.array([64, 128 + 4])[KEYSPACE.group_of(made.delta.keys)].sum()
    assert summary["migration_seconds"] > 0
    assert (made.gains > 0).all()


@pytest.mark.parametrize(("name", "rows"), [("azure-a100-200g", 150_000), ("h100-400g", 0)])
def test_presets_with_a_large_job(name: str, rows: int) -> None:
    """The smaller lead of an all-reduce in the H100 figures does not pay for its latency with so few rows."""
    keyspace = KeySpace([TableSpec("items", 300_000, 128)])
    made = make_plan(
        profile(keyspace, 4e8, hot=150_000),
        keyspace,
        RankLayout(4, 8),
        load_preset(name),
        [15_000],
        Placement.empty(),
        ORIGIN,
        horizon_steps=1e4,
    )
    assert 0.9 * rows <= len(made.target) <= rows
    assert (made.costs.after.exposed_seconds < made.costs.baselines["two_hop"].exposed_seconds) == (rows > 0)
    assert made.costs.after.exposed_seconds < made.costs.baselines["row_wise_dedup"].exposed_seconds
    assert made.optimum.gap < 1e-3
    assert ("no row is replicated" in made.costs.messages()[0]) == (rows == 0)


def test_placement_cost_of_nothing_is_the_chain() -> None:
    loads = make_loads(profile(KEYSPACE, ACCESSES, hot=50), KEYSPACE, LAYOUT)
    made = plan(profile(KEYSPACE, ACCESSES, hot=50), slots=(0, 0))
    cost = placement_cost(loads, Placement.empty(), KEYSPACE, cluster())
    assert cost.to_dict() == made.costs.baselines["two_hop"].to_dict()
    # Unlisted rows of a placement are priced, not forgotten.
    unlisted = np.setdiff1d(np.arange(5000), loads[0].keys)[:40]
    cost = placement_cost(loads, Placement.of(unlisted, np.full(40, Tier.DEVICE, np.uint8)), KEYSPACE, cluster())
    assert cost.rows[Tier.DEVICE] == 40
    assert cost.sync_seconds > 0


def test_a_layout_is_priced_with_its_own_world_alone() -> None:
    seen, direct = profile(KEYSPACE, ACCESSES, hot=50), Exchange.DIRECT_DEDUP
    machine = cluster(latency=1e-6)
    slow = WorldModel(8, 8, CollectiveCurve(1.0, ((1.0, 1.0),)))
    probed = dataclasses.replace(machine, world=slow)
    loads = make_loads(seen, KEYSPACE, LAYOUT)
    # The curve over the world is that of 8 x 8 ranks.
    priced = placement_cost(loads, Placement.empty(), KEYSPACE, probed, direct).exposed_seconds
    assert priced == placement_cost(loads, Placement.empty(), KEYSPACE, machine, direct).exposed_seconds
    own = dataclasses.replace(probed, world=dataclasses.replace(slow, nodes=2, local_ranks=2))
    assert placement_cost(loads, Placement.empty(), KEYSPACE, own, direct).exposed_seconds > 1.0


def messages_of(accesses: np.ndarray, tier: Tier, **machine: float) -> tuple[list[str], float]:
    """Return (the sentences, exposed seconds saved)."""
    problem, prices = load(accesses), cluster(**machine)
    tiers = [np.full(len(accesses), each, np.uint8) for each in (Tier.HOME, tier)]
    home, plan = (group_cost(problem, each, LAYOUT, prices) for each in tiers)
    dedup = group_cost(problem, tiers[0], LAYOUT, prices, Exchange.DIRECT_DEDUP)
    costs = PlanCosts(prices, Exchange.CHAIN, home, plan, {"two_hop": home, "row_wise_dedup": dedup})
    return costs.messages(), home.exposed_seconds - plan.exposed_seconds


def test_the_first_sentence_is_the_saving_and_bandwidths_are_those_of_the_messages() -> None:
    messages, saved = messages_of(np.full(2000, 5.0), Tier.NODE)
    assert saved > 0
    assert messages[0].startswith(f"replicas save {units.seconds(saved)} of exposed communication per step")
    assert "20 GB/s a rank (80% of the wire), an all-to-all 10 GB/s (40%): 2.00 times as much" in messages[2]
    assert not any("exchange 'direct'" in sentence for sentence in messages)
    messages, saved = messages_of(np.full(2000, 0.05), Tier.NODE, all_reduce=9e9)
    assert saved < 0
    assert messages[0].startswith(f"replicas cost {units.seconds(-saved)} more exposed communication per step")


TWO_DIMS = KeySpace(
    [TableSpec("a", 1500, 8), TableSpec("b", 700, 16, optimizer="rowwise_adagrad"), TableSpec("c", 800, 8)]
)


def random_placement(rng: np.random.Generator, layout: RankLayout, slots: np.ndarray, rows: int) -> Placement:
    """A placement that fits: rows are added in random order as long as their prefix does."""
    keys = rng.permutation(TWO_DIMS.total_rows)[:rows].astype(np.int64)
    tiers = rng.integers(1, 3, rows).astype(np.uint8)
    fits = [n for n in range(rows + 1) if (slots_used(keys[:n], tiers[:n], TWO_DIMS, layout) <= slots[:, None]).all()]
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
    delta = plan_delta(live, target, rng.exponential(1.0, len(target)), TWO_DIMS, layout, slots.tolist())
    assert len(np.unique(delta.keys)) == len(delta)
    placement = live
    for chunk in delta_chunks(delta, TWO_DIMS, layout, int(rng.integers(1, 40)), int(rng.integers(1, 4000))):
        placement = placement.apply(chunk)
        assert (slots_used(placement.keys, placement.tiers, TWO_DIMS, layout) <= slots[:, None]).all()
    assert np.array_equal(placement.keys, target.keys)
    assert np.array_equal(placement.tiers, target.tiers)
    change = np.zeros((2, layout.world_size), np.int64) + slots_used(live.keys, live.tiers, TWO_DIMS, layout)
    for i in range(len(delta)):
        one = delta.select(slice(i, i + 1))
        change = change + slots_used(one.keys, one.new_tiers, TWO_DIMS, layout)
        change = change - slots_used(one.keys, one.old_tiers, TWO_DIMS, layout)
        assert (change <= slots[:, None]).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 50), st.integers(1, 3000))
def test_chunks_keep_their_limits(seed: int, most_rows: int, most_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    layout = RankLayout(2, 2)
    live, target = (random_placement(rng, layout, np.array([60, 60]), 100) for _ in range(2))
    delta = plan_delta(live, target, np.ones(len(target)), TWO_DIMS, layout, [60, 60])
    chunks = list(delta_chunks(delta, TWO_DIMS, layout, most_rows, most_bytes))
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *(c.keys for c in chunks)]), delta.keys)
    sizes = [int(moved_bytes(c, TWO_DIMS, layout).sum()) for c in chunks]
    for i, chunk in enumerate(chunks):
        assert 1 <= len(chunk) <= most_rows
        assert sizes[i] <= most_bytes or len(chunk) == 1
        if i + 1 < len(chunks):
            more = int(moved_bytes(chunks[i + 1].select(slice(0, 1)), TWO_DIMS, layout).sum())
            assert len(chunk) == most_rows or sizes[i] + more > most_bytes


def test_the_best_rows_per_byte_come_first_and_demotions_late() -> None:
    layout = RankLayout(2, 1)
    live = Placement.of(np.arange(0, 200), np.full(200, Tier.NODE, np.uint8))
    keys = np.concatenate([np.arange(400, 600), np.arange(2400, 2600)])
    gains = np.random.default_rng(0).permutation(400).astype(np.float64)
    target = Placement.of(keys, np.full(400, Tier.NODE, np.uint8))
    gains = gains[np.argsort(np.argsort(keys))]
    # 100 live rows fill each rank of the first dim-group; there is room for another 40.
    delta = plan_delta(live, target, gains, TWO_DIMS, layout, [140, 200])
    up = delta.new_tiers > delta.old_tiers
    promoted = delta.select(np.flatnonzero(up))
    density = gains[np.searchsorted(target.keys, promoted.keys)] / moved_bytes(promoted, TWO_DIMS, layout)
    assert (np.diff(density) <= 0).all()
    first_demotion = int(np.argmin(up))
    assert first_demotion > 0, "room was free, so promotions need not wait"
    assert up[first_demotion:].any(), "demotions are not put off to the end either"


def test_moved_bytes() -> None:
    layout = RankLayout(2, 2)
    live = Placement.of(np.array([0, 1, 2200]), np.array([Tier.DEVICE, Tier.NODE, Tier.NODE], np.uint8))
    target = Placement.of(np.array([0, 1, 2, 2500]), np.array([Tier.NODE, Tier.DEVICE, Tier.NODE, Tier.NODE], np.uint8))
    delta = live.delta_to(target)
    moved = dict(zip(delta.keys.tolist(), moved_bytes(delta, TWO_DIMS, layout).tolist(), strict=True))
    assert moved == {0: 0, 1: 32, 2: 32, 2200: 0, 2500: 64 + 4}
