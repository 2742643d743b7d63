"""Exact choices within slots of ranks and among the few rows that prices leave in doubt, and their bounds."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.planner.model.cost import row_seconds, usable_tiers
from flexd.planner.model.prices import Exchange
from flexd.planner.model.workload import TrainingShape
from flexd.planner.plan import Plan, make_plan
from flexd.planner.solver import assign
from flexd.planner.solver.assign import (
    FREE,
    Assignment,
    GroupLimits,
    PlanLimits,
    RowPin,
    best_within_slots,
    slots_used,
)
from flexd.topology.cluster import Exposed
from tests.support.planner_cases import ORIGIN, choose_tiers, cluster, group_cost, load, profile


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 10), st.integers(2, 4), st.integers(0, 6))
def test_equals_the_best_subset(seed: int, rows: int, ranks: int, most_slots: int) -> None:
    rng = np.random.default_rng(seed)
    gains = rng.exponential(1.0, rows)
    homes = rng.integers(0, ranks, rows)
    slots = rng.integers(0, most_slots + 1, ranks)
    best = 0.0
    for subset in itertools.product((False, True), repeat=rows):
        chosen = np.array(subset)
        if (chosen.sum() - np.bincount(homes[chosen], minlength=ranks) <= slots).all():
            best = max(best, float(gains[chosen].sum()))
    chosen = best_within_slots(gains, homes, slots)
    assert (chosen.sum() - np.bincount(homes[chosen], minlength=ranks) <= slots).all()
    assert gains[chosen].sum() == pytest.approx(best)


def gains_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    """float64[3, n]: skewed, DEVICE above NODE for some rows, below for others, some tiers closed."""
    node = rng.pareto(1.0, rows) - 0.1
    gains = np.stack([np.zeros(rows), node, node * rng.uniform(0.5, 4.0, rows)])
    gains[1:][rng.random((2, rows)) < 0.1] = -np.inf
    return gains


@pytest.mark.parametrize("core", [24, 60])
def test_more_rows_than_the_core_takes(monkeypatch: pytest.MonkeyPatch, core: int) -> None:
    better = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        keys = np.sort(rng.choice(1200, 300, replace=False)).astype(np.int64)
        gains = gains_of(rng, 300)
        limits = GroupLimits(rng.integers(5, 15, 6), np.full(300, FREE, np.uint8))
        problem = Assignment(RankLayout(3, 2), keys, gains, limits, (Tier.NODE, Tier.DEVICE))
        monkeypatch.setattr(assign, "_MAX_CORE_ROWS", core)
        tiers, bound = problem.best(gains)
        monkeypatch.setattr(assign, "_MAX_CORE_ROWS", 0)
        plain, plain_bound = problem.best(gains)
        ours, without = (float(gains[each, np.arange(300)].sum()) for each in (tiers, plain))
        assert limits.fits(keys, tiers, RankLayout(3, 2))
        assert without <= ours <= bound
        assert bound == pytest.approx(plain_bound), "a core says nothing about all the rows"
        better += without < ours
        # The order of the rows is no matter.
        order = rng.permutation(300)
        monkeypatch.setattr(assign, "_MAX_CORE_ROWS", core)
        problem = Assignment(RankLayout(3, 2), keys[order], gains[:, order], limits, (Tier.NODE, Tier.DEVICE))
        again, _ = problem.best(gains[:, order])
        assert gains[tiers, np.arange(300)].sum() == pytest.approx(gains[:, order][again, np.arange(300)].sum())
    assert better >= 1


KEYSPACE = KeySpace([TableSpec("items", 2000, 16), TableSpec("users", 1000, 16), TableSpec("tags", 800, 32)])
LAYOUT = RankLayout(2, 2)


def plan(limits: PlanLimits | None = None, *, live: Placement | None = None, **changes: object) -> Plan:
    slots = changes.pop("slots", (120, 60))
    machine = changes.pop("machine", cluster())
    shift, keyspace = changes.pop("shift", 0), changes.pop("keyspace", KEYSPACE)
    return make_plan(
        profile(keyspace, 8000.0, hot=300, shift=shift),
        keyspace,
        LAYOUT,
        machine,
        slots,
        live or Placement.empty(),
        ORIGIN,
        horizon_steps=1e5,
        limits=limits,
        **changes,
    )


def used_by(made: Plan) -> np.ndarray:
    return slots_used(made.target.keys, made.target.tiers, KEYSPACE, LAYOUT)


def milp_gain(keys: np.ndarray, gains: np.ndarray, layout: RankLayout, limits: GroupLimits) -> float:
    """The most the free rows gain within every limit: HiGHS, exact."""
    tiers, n, world = usable_tiers(layout), len(keys), layout.world_size
    held = np.concatenate(
        [np.stack([layout.holds_replica(r, keys, np.full(n, t, np.uint8)) for r in range(world)]) for t in tiers],
        axis=1,
    ).astype(float)
    fixed = limits.fixed
    low, high = np.zeros((len(tiers), n)), np.ones((len(tiers), n))
    for i, tier in enumerate(tiers):
        low[i, fixed == tier] = 1.0
        high[i, (fixed != FREE) & (fixed != tier)] = 0.0
    constraints = [
        LinearConstraint(held, ub=limits.slots.astype(float)),
        LinearConstraint(np.concatenate([np.eye(n)] * len(tiers), axis=1), ub=1.0),
    ]
    value = np.concatenate([np.where(fixed == FREE, gains[t], 0.0) for t in tiers])
    scale = 1e5 / max(float(np.abs(value).max()), 1e-30)
    result = milp(-value * scale, constraints=constraints, integrality=np.ones(len(value)),
                  bounds=Bounds(low.ravel(), high.ravel()), options={"mip_rel_gap": 0.0})  # fmt: skip
    assert result.success
    return float(value @ np.round(result.x))


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "layout": st.sampled_from([RankLayout(2, 2), RankLayout(3, 2), RankLayout(1, 4), RankLayout(4, 1)]),
        "slots": st.integers(0, 12),
        "micro_batches": st.sampled_from([1, 4]),
        "frozen": st.booleans(),
        "pins": st.integers(0, 3),
        "sync": st.sampled_from([0.3, 0.6, 1.0]),
    }
)


@settings(max_examples=25, deadline=None)
@given(cases)
def test_no_limit_is_broken_and_nothing_lost_against_the_milp(case: dict) -> None:
    layout, rng, rows = case["layout"], np.random.default_rng(case["seed"]), 30
    keys = np.sort(rng.choice(120, rows, replace=False)).astype(np.int64)
    accesses, trained = rng.pareto(1.0, rows), (rng.random(rows) > 0.3).astype(np.float64)
    problem = load(
        accesses, keys, micro_batches=case["micro_batches"], trained=trained if case["frozen"] else None, layout=layout
    )
    fixed = np.full(rows, FREE, np.uint8)
    for row in rng.choice(rows, case["pins"], replace=False):
        fixed[row] = rng.choice([Tier.HOME, *usable_tiers(layout)])
    limits = GroupLimits(rng.integers(case["slots"], case["slots"] + 4, layout.world_size), fixed)
    machine = cluster(exposed=Exposed(1.0, 1.0, case["sync"]))
    home = np.where(fixed == FREE, 0, fixed).astype(np.uint8)
    if not limits.fits(problem.keys, home, layout):
        with pytest.raises(PlanError, match="pinned rows take more"):
            choose_tiers(problem, layout, machine, limits, np.zeros(rows, np.uint8), np.inf)
        return
    choice = choose_tiers(problem, layout, machine, limits, np.zeros(rows, np.uint8), np.inf)
    assert limits.fits(problem.keys, choice.tiers, layout)
    factors = row_seconds(problem, machine, np.zeros((3, 6, 2)))
    gains = (factors[Tier.HOME] - factors) @ problem.statistics
    base = group_cost(problem, home, layout, machine).exposed_seconds
    ours = base - choice.cost.exposed_seconds
    best = milp_gain(problem.keys, gains, layout, limits)
    assert ours <= best * (1 + 1e-9) + 1e-15
    assert choice.optimum.lower_bound_seconds <= base - best + 1e-15
    assert ours == pytest.approx(best, rel=1e-9, abs=1e-15)


def test_pins_hold_whether_they_pay_or_not_and_unlisted_rows_are_listed() -> None:
    cold = np.setdiff1d(np.arange(2000), profile(KEYSPACE, 8000.0, hot=300).tables[0].hot_rows)[:7]
    hottest = profile(KEYSPACE, 8000.0, hot=300).tables[0].hot_rows[:5]
    made = plan(PlanLimits(pins=(RowPin("items", Tier.DEVICE, cold), RowPin("items", Tier.HOME, hottest))))
    assert (made.target.tiers_of(KEYSPACE.keys(0, cold)) == Tier.DEVICE).all()
    assert (made.target.tiers_of(KEYSPACE.keys(0, hottest)) == Tier.HOME).all()
    assert (plan().target.tiers_of(KEYSPACE.keys(0, hottest)) != Tier.HOME).all()
    assert len(made.gains) == len(made.target)
    assert (used_by(made) <= np.array(made.slots)[:, None]).all()
    # The pins' slots come first; what is left is used up all the same.
    assert used_by(made)[0].max() >= 110


def test_excluded_tables_stay_home_and_their_live_rows_come_down() -> None:
    first = plan()
    assert (KEYSPACE.table_of(first.target.keys) == 1).any()
    second = plan(PlanLimits(exclude_tables=frozenset({"users"})), live=first.target)
    assert not (KEYSPACE.table_of(second.target.keys) == 1).any()
    assert second.demotions > 0


def test_rows_of_tables_with_other_sharding_types_are_not_copied() -> None:
    items, users, tags = KEYSPACE.tables
    for rule in ("table_row_wise:0", "table_wise:1", "data_parallel"):
        ruled = KeySpace([items, replace(users, sharding=rule), tags])
        tables = ruled.table_of(plan(keyspace=ruled).target.keys)
        assert (tables == 0).any()
        assert not (tables == 1).any()
        with pytest.raises(PlanError, match="is not row_wise"):
            plan(PlanLimits(pins=(RowPin("users", Tier.NODE),)), keyspace=ruled)


def test_the_direct_exchange_is_recommended_where_latency_decides() -> None:
    kept = plan(machine=cluster(latency=1e-4))
    assert (kept.costs.exchange, kept.costs.recommended_exchange) == (Exchange.CHAIN, Exchange.DIRECT_DEDUP)
    assert kept.summary["exchange"]["recommended"] == "direct_dedup"
    assert any("exchange 'direct'" in message for message in kept.summary["replication"]["messages"])
    assert kept.costs.after.exposed_seconds <= kept.costs.baselines["two_hop"].exposed_seconds


def test_frozen_tables_are_replicated_as_far_as_slots_go() -> None:
    machine = cluster(all_reduce=1e9, latency=1e-3)  # no synchronisation would ever pay
    assert len(plan(machine=machine).target) == 0
    made = plan(machine=machine, shape=TrainingShape(frozen_tables=frozenset({"items"})))
    assert set(KEYSPACE.table_of(made.target.keys)) == {0}
    assert made.costs.after.sync_seconds == 0
    assert used_by(made)[0].max() > 100


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (PlanLimits(exclude_tables=frozenset({"other"})), "do not exist: other"),
        (PlanLimits(pins=(RowPin("items", Tier.NODE, np.array([5000])),)), "outside it"),
        (PlanLimits(pins=(RowPin("items", Tier.NODE, np.array([-1])),)), "outside it"),
        (PlanLimits(exclude_tables=frozenset({"items"}), pins=(RowPin("items", Tier.NODE),)), "excluded and pinned"),
        (PlanLimits(pins=(RowPin("items", Tier.DEVICE),)), "pinned rows take more"),
    ],
)
def test_bad_limits(limits: PlanLimits, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(limits)
