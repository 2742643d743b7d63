"""The bound of the busiest ranks against every placement, and tiers that level them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.cost import group_cost
from flexd.planner.model.gains import usable_tiers
from flexd.planner.model.row_bytes import Exchange
from flexd.planner.model.workload import GroupLoad
from flexd.planner.solver.limits import FREE, GroupLimits
from flexd.planner.solver.tiers import choose_tiers
from flexd.topology.cluster import Cluster, Exposed
from flexd.topology.files import load_preset
from tests.support.planner_cases import cluster, load, zipf

LAYOUTS = [RankLayout(2, 2), RankLayout(3, 2), RankLayout(1, 3), RankLayout(4, 1), RankLayout(2, 3)]
EXCHANGES = [Exchange.CHAIN, Exchange.DIRECT_DEDUP]

problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "layout": st.sampled_from(LAYOUTS),
        "exchange": st.sampled_from(EXCHANGES),
        "slots": st.integers(0, 5),
        "scale": st.floats(0.02, 3.0),
        "latency": st.sampled_from([0.0, 1e-9, 1e-8]),
        "sync": st.sampled_from([0.3, 1.0]),
        "cover": st.sampled_from([np.inf, 0.0, 5e-8]),
        "frozen": st.booleans(),
        "homes": st.integers(1, 6),
    }
)


def made(case: dict, rows: int) -> tuple[GroupLoad, Cluster]:
    """Rows at home on few ranks if ``homes`` is small."""
    rng = np.random.default_rng(case["seed"])
    world = case["layout"].world_size
    keys = rng.choice(60, rows, replace=False) * world + rng.integers(0, min(case["homes"], world), rows)
    problem = load(case["scale"] * rng.pareto(1.0, rows), keys.astype(np.int64), bin_accesses=(0.1,), bin_rows=(9.0,))
    if case["frozen"]:
        problem = replace(problem, trained=(rng.random(rows) < 0.5).astype(float), bin_trained=np.ones(1))
    exposed = Exposed(1.0, 1.0, case["sync"], cover_seconds=case["cover"])
    return problem, cluster(latency=case["latency"], exposed=exposed)


def prices_of_all(case: dict, problem: GroupLoad, machine: Cluster, limits: GroupLimits) -> dict[tuple, float]:
    layout, exchange = case["layout"], case["exchange"]
    allowed = (Tier.HOME, *usable_tiers(layout, exchange))
    result = {}
    for tiers in itertools.product(allowed, repeat=len(problem.keys)):
        mine = np.array(tiers, np.uint8)
        if limits.fits(problem.keys, mine, layout):
            result[tuple(mine.tolist())] = group_cost(problem, mine, layout, machine, exchange).peak_exposed_seconds
    return result


@settings(max_examples=25, deadline=None)
@given(problems)
def test_no_placement_is_below_the_bound_and_levelling_never_costs(case: dict) -> None:
    rows, layout = 4, case["layout"]
    problem, machine = made(case, rows)
    limits = GroupLimits.of(case["slots"], layout)
    every = prices_of_all(case, problem, machine, limits)
    live = np.zeros(rows, np.uint8)
    mean, level = (
        choose_tiers(problem, layout, machine, limits, live, np.inf, case["exchange"], level=each)
        for each in (False, True)
    )
    least = min(every.values())
    for choice in (mean, level):
        found = every[tuple(choice.tiers.tolist())]
        assert choice.cost.peak_exposed_seconds == pytest.approx(found, rel=1e-12)
        assert choice.busiest.objective_seconds == pytest.approx(found, rel=1e-9, abs=1e-18)
        assert choice.busiest.lower_bound_seconds <= least * (1 + 1e-9) + 1e-18
        assert 0.0 <= choice.busiest.gap <= 1.0
        home = every[(0,) * rows]
        saved, possible = home - found, home - choice.busiest.lower_bound_seconds
        if possible > 1e-9 * home:
            # The certificate: the best placement saves no more than the plan and the gap together.
            assert home - least <= saved + choice.busiest.gap * possible + 1e-9 * home or saved < 0
    assert level.cost.peak_exposed_seconds <= mean.cost.peak_exposed_seconds * (1 + 1e-12)
    assert level.cost.peak_exposed_seconds <= every[(0,) * rows] * (1 + 1e-12)


@settings(max_examples=15, deadline=None)
@given(problems, st.integers(0, 4), st.booleans())
def test_levelling_keeps_to_slots_pins_and_budgets(case: dict, budget: int, pinned: bool) -> None:
    rows, layout = 60, case["layout"]
    problem, machine = made({**case, "exchange": Exchange.CHAIN}, rows)
    rng = np.random.default_rng(case["seed"])
    fixed = np.full(rows, FREE, np.uint8)
    if pinned:
        fixed[:3] = [Tier.HOME, Tier.HOME, Tier.NODE if layout.nodes > 1 else Tier.DEVICE]
    slots = rng.integers(1, 9, layout.world_size)
    limits = GroupLimits(slots, fixed, rng.integers(-1, 1, rows), np.array([budget + 1]))
    live = np.zeros(rows, np.uint8)
    mean, level = (choose_tiers(problem, layout, machine, limits, live, np.inf, level=each) for each in (False, True))
    assert limits.fits(problem.keys, level.tiers, layout)
    assert level.busiest.objective_seconds <= mean.busiest.objective_seconds
    assert level.busiest.lower_bound_seconds <= level.busiest.objective_seconds
    assert level.lower_bound_seconds <= level.objective_seconds * (1 + 1e-12)


def skewed(rows: int, layout: RankLayout) -> GroupLoad:
    """The hottest 5 % of the rows live on the first half of the ranks of the first node."""
    keys = np.random.default_rng(1).permutation(rows * 4)[:rows].astype(np.int64)
    hot, world = slice(0, rows // 20), layout.world_size
    keys[hot] = keys[hot] // world * world + keys[hot] % world // layout.local_ranks
    keys, first = np.unique(keys, return_index=True)
    return load(zipf(rows, 1.2, 2.0 * rows)[first], keys, row_bytes=256)


def test_levelling_wins_where_hot_rows_share_a_home_and_proves_how_much_is_left() -> None:
    layout = RankLayout(4, 8)
    problem = skewed(5000, layout)
    machine = load_preset("h100-400g").bandwidth_only()
    live = np.zeros(len(problem.keys), np.uint8)
    mean, level = (choose_tiers(problem, layout, machine, 50, live, np.inf, level=each) for each in (False, True))
    assert layout.replica_slots_used(problem.keys, level.tiers).max() <= 50
    assert level.busiest.objective_seconds < 0.95 * mean.busiest.objective_seconds
    assert level.busiest.gap < 0.5 < mean.busiest.gap
    # A bound alone ends its rounds early.
    assert mean.busiest.lower_bound_seconds == pytest.approx(level.busiest.lower_bound_seconds, rel=1e-2)
    # What a plan takes stays while the profile is the same.
    again = choose_tiers(problem, layout, machine, 50, level.tiers, 1e4, level=True)
    assert np.array_equal(again.tiers, level.tiers)


def test_a_plan_that_latencies_keep_at_home_is_proven_best() -> None:
    layout = RankLayout(4, 8)
    problem = skewed(5000, layout)
    choice = choose_tiers(problem, layout, load_preset("h100-400g"), 50, np.zeros(len(problem.keys), np.uint8), np.inf)
    assert not choice.tiers.any()
    assert choice.cost.imbalance > 1.005
    assert choice.busiest.gap == 0.0
    assert choice.busiest.lower_bound_seconds == choice.cost.peak_exposed_seconds
