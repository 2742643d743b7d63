"""The optimiser against brute force and an exact MILP with the slots of every rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix, hstack

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.cost import group_cost
from flexd.planner.model.gains import row_seconds, usable_tiers
from flexd.planner.model.workload import GroupLoad, statistics
from flexd.planner.solver.tiers import choose_tiers
from flexd.topology.cluster import Exposed
from tests.support.planner_cases import cluster, load

LAYOUTS = [RankLayout(2, 2), RankLayout(3, 2), RankLayout(1, 4), RankLayout(4, 1), RankLayout(2, 3)]


def gains_of(problem: GroupLoad, layout: RankLayout, machine: object) -> np.ndarray:
    factors = row_seconds(problem, layout, machine, np.zeros((3, 6, 3)))
    return (factors[Tier.HOME] - factors) @ statistics(problem.accesses, layout)


def milp_gain(problem: GroupLoad, gains: np.ndarray, layout: RankLayout, slots: int) -> float:
    """The most that tiers within every rank's slots can gain: HiGHS, exact."""
    tiers = usable_tiers(layout)
    n = len(problem.keys)
    blocks = [
        csr_matrix(
            np.stack([layout.holds_replica(r, problem.keys, np.full(n, t, np.uint8)) for r in range(layout.world_size)])
        )
        for t in tiers
    ]
    held = hstack(blocks)
    once = hstack([csr_matrix(np.eye(n))] * len(tiers))
    result = milp(
        # HiGHS stops within 1e-6 of the optimum: scale far above that.
        -np.concatenate([gains[t] for t in tiers]) * 1e5 / max(float(gains.max()), 1e-30),
        constraints=[LinearConstraint(held, ub=float(slots)), LinearConstraint(once, ub=1.0)],
        integrality=np.ones(n * len(tiers)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    assert result.success
    # HiGHS calls 0.999999 an integer: count whole rows.
    chosen = np.round(result.x).reshape(len(tiers), n)
    return sum(float(gains[t] @ chosen[i]) for i, t in enumerate(tiers))


problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "layout": st.sampled_from(LAYOUTS),
        "sync": st.sampled_from([0.3, 0.6, 1.0]),
        "slots": st.integers(0, 14),
        "scale": st.floats(0.02, 3.0),
    }
)


def make(case: dict, rows: int):
    rng = np.random.default_rng(case["seed"])
    accesses = case["scale"] * rng.pareto(1.0, rows)
    keys = rng.choice(rows * 4, rows, replace=False).astype(np.int64)
    return load(accesses, keys), cluster(exposed=Exposed(1.0, 1.0, case["sync"]))


@settings(max_examples=60, deadline=None)
@given(problems)
def test_as_good_as_the_milp(case: dict) -> None:
    layout = case["layout"]
    problem, machine = make(case, 40)
    gains = gains_of(problem, layout, machine)
    best = milp_gain(problem, gains, layout, case["slots"])
    choice = choose_tiers(problem, layout, machine, case["slots"], np.zeros(40, np.uint8), np.inf)
    ours = gains[choice.tiers, np.arange(40)].sum()
    home = group_cost(problem, np.zeros(40, np.uint8), layout, machine).exposed_seconds
    assert ours == pytest.approx(home - choice.cost.exposed_seconds, abs=1e-15)
    assert ours <= best * (1 + 1e-9) + 1e-18
    assert ours == pytest.approx(best, rel=1e-9, abs=1e-18)
    assert choice.lower_bound_seconds <= home - best + 1e-15


@settings(max_examples=25, deadline=None)
@given(problems)
def test_against_brute_force(case: dict) -> None:
    layout, rows = case["layout"], 5
    problem, machine = make(case, rows)
    slots = case["slots"] % 5
    allowed = (Tier.HOME, *usable_tiers(layout))
    costs = {}
    for tiers in itertools.product(allowed, repeat=rows):
        tiers = np.array(tiers, np.uint8)
        if layout.replica_slots_used(problem.keys, tiers).max() <= slots:
            costs[tuple(tiers)] = group_cost(problem, tiers, layout, machine).exposed_seconds
    choice = choose_tiers(problem, layout, machine, slots, np.zeros(rows, np.uint8), np.inf)
    assert tuple(choice.tiers) in costs
    best = min(costs.values())
    assert choice.cost.exposed_seconds == pytest.approx(costs[tuple(choice.tiers)])
    assert choice.lower_bound_seconds <= best * (1 + 1e-12)
    assert choice.cost.exposed_seconds == pytest.approx(best, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(problems)
def test_fixed_costs_are_paid_only_when_they_pay(case: dict) -> None:
    layout, rows = case["layout"], 5
    problem, _ = make(case, rows)
    machine = cluster(latency=2e-9 * (1 + case["seed"] % 7), exposed=Exposed(1.0, 1.0, case["sync"]))
    costs = [
        group_cost(problem, np.array(tiers, np.uint8), layout, machine).exposed_seconds
        for tiers in itertools.product((Tier.HOME, *usable_tiers(layout)), repeat=rows)
    ]
    choice = choose_tiers(problem, layout, machine, 100, np.zeros(rows, np.uint8), np.inf)
    assert choice.cost.exposed_seconds == pytest.approx(min(costs), rel=1e-9)
    assert choice.lower_bound_seconds <= min(costs) * (1 + 1e-12)
