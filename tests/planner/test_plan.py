"""make_plan from a profile to a plan and its summary."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from flexd.core import units
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.planner.model.prices import Exchange
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import Plan, PlanCosts, make_plan, placement_cost
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
    assert summary["plan_id"] == "p2"
    assert summary["parent_id"] == "p1"
    assert (summary["topology_generation"], summary["profile_generation"]) == (4, 3)
    assert summary["created_unix_seconds"] == 123.5
    assert summary["promotions"] == len(made.target) > 0
    assert summary["demotions"] == 0
    assert sum(summary["rows"].values()) == len(made.target)
    assert summary["after"]["exposed_seconds"] < summary["before"]["exposed_seconds"]
    assert summary["before"]["exposed_seconds"] == pytest.approx(summary["baselines"]["two_hop"]["exposed_seconds"])
    assert set(summary["baselines"]) == {"row_wise_dedup", "two_hop"}
    assert 0 <= summary["gap"] < 0.01
    assert summary["lower_bound_seconds"] <= summary["objective_seconds"]
    moved = [64, 128 + 4]
    groups = KEYSPACE.group_of(made.delta.keys)
    assert summary["migration_bytes"] == sum(moved[g] for g in groups)
    assert summary["migration_seconds"] > 0
    assert len(made.gains) == len(made.target)
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
    live = Placement.of(unlisted, np.full(40, Tier.DEVICE, np.uint8))
    cost = placement_cost(loads, live, KEYSPACE, cluster())
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


def test_replicas_that_cost_more_are_said_to_cost_more() -> None:
    messages, saved = messages_of(np.full(2000, 0.05), Tier.NODE, all_reduce=9e9)
    assert saved < 0
    assert messages[0].startswith(f"replicas cost {units.seconds(-saved)} more exposed communication per step")
