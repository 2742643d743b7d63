"""Properties of the optimiser that users rely on, and fixed costs against brute force (``test_limits`` has a MILP)."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.placement import RankLayout, Tier
from flexd.planner.model.cost import usable_tiers
from flexd.topology.cluster import Exposed
from tests.support.planner_cases import choose_tiers, cluster, group_cost, load, zipf

LAYOUT = RankLayout(2, 2)
NONE = np.inf


def no_live(rows: int) -> np.ndarray:
    return np.zeros(rows, np.uint8)


def test_a_migration_must_pay_within_the_horizon() -> None:
    problem = load(np.full(40, 3.0))
    assert choose_tiers(problem, LAYOUT, cluster(), 40, no_live(40), 1000.0).tiers.all()
    assert not choose_tiers(problem, LAYOUT, cluster(), 40, no_live(40), 0.5).tiers.any()
    # Rows that are there already have nothing to pay.
    live = choose_tiers(problem, LAYOUT, cluster(), 40, no_live(40), NONE).tiers
    assert np.array_equal(choose_tiers(problem, LAYOUT, cluster(), 40, live, 0.5).tiers, live)


def test_promotion_needs_the_lower_bound_and_demotion_the_upper() -> None:
    # The threshold lies where NODE begins to pay; 2 % around it, with bounds of 30 %, nothing moves.
    grid = np.linspace(0.05, 3.0, 400)
    alone = choose_tiers(load(grid), RankLayout(4, 1), cluster(), 400, no_live(400), NONE).tiers
    threshold = grid[np.argmax(alone > 0)]
    assert 0.1 < threshold < 2.0
    for factor in (0.95, 1.05):
        near = load(np.full(8, threshold * factor), relative_error=0.3)
        assert not choose_tiers(near, RankLayout(4, 1), cluster(), 8, no_live(8), NONE).tiers.any()
    above, below = load(np.full(8, threshold * 1.05), relative_error=0.3), load(np.full(8, threshold * 0.95))
    stay = np.full(8, Tier.NODE, np.uint8)
    assert (choose_tiers(above, RankLayout(4, 1), cluster(), 8, stay, NONE).tiers == Tier.NODE).all()
    assert not choose_tiers(below, RankLayout(4, 1), cluster(), 8, stay, NONE).tiers.any()
    assert (choose_tiers(load(np.full(8, 2 * threshold)), RankLayout(4, 1), cluster(), 8, no_live(8), NONE).tiers).all()


def test_an_upper_bound_never_keeps_a_placement_that_the_estimate_prices_above_home() -> None:
    layout, live = RankLayout(4, 1), np.full(8, Tier.NODE, np.uint8)
    assert not choose_tiers(load(np.full(8, 0.05), relative_error=60.0), layout, cluster(), 8, live, NONE).tiers.any()
    # Beside rows that pay, the doubtful ones may stay.
    mixed = load(np.array([4.0] * 8 + [0.3]), relative_error=5.0)
    kept = choose_tiers(mixed, layout, cluster(), 9, np.full(9, Tier.NODE, np.uint8), NONE)
    fresh = choose_tiers(load(np.array([4.0] * 8 + [0.3])), layout, cluster(), 9, no_live(9), NONE)
    assert kept.tiers[8] == Tier.NODE
    assert fresh.tiers.tolist() == [Tier.NODE] * 8 + [Tier.HOME]


def test_compute_beside_the_exchange_limits_what_copies_save() -> None:
    """Everything runs beside compute: copies save what is longer than compute, and nothing where compute covers all."""
    problem = load(zipf(2000, 1.2, 4000.0), np.random.default_rng(0).permutation(2000).astype(np.int64))

    def chosen(cover_seconds: float):
        machine = cluster(exposed=Exposed(0.0, 0.0, 0.0, cover_seconds))
        return choose_tiers(problem, LAYOUT, machine, 500, no_live(2000), NONE)

    home = group_cost(problem, no_live(2000), LAYOUT, cluster()).total_seconds
    best = chosen(0.0)
    saved = home - best.cost.exposed_seconds
    assert saved > 0.1 * home
    covered = chosen(home * 1.01)
    assert not covered.tiers.any()
    assert covered.cost.exposed_seconds == 0
    part = chosen(home - saved / 2)
    assert part.tiers.any()
    assert part.cost.exposed_seconds == 0
    assert part.optimum.lower_bound_seconds <= part.optimum.objective_seconds
    whole = chosen(home - 2 * saved)
    assert np.array_equal(whole.tiers, best.tiers)
    assert whole.cost.exposed_seconds == pytest.approx(saved)


LAYOUTS = [RankLayout(2, 2), RankLayout(3, 2), RankLayout(1, 4), RankLayout(4, 1), RankLayout(2, 3)]


problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "layout": st.sampled_from(LAYOUTS),
        "sync": st.sampled_from([0.3, 0.6, 1.0]),
        "scale": st.floats(0.02, 3.0),
    }
)


@settings(max_examples=25, deadline=None)
@given(problems)
def test_fixed_costs_are_paid_only_when_they_pay(case: dict) -> None:
    layout, rows = case["layout"], 5
    rng = np.random.default_rng(case["seed"])
    accesses = case["scale"] * rng.pareto(1.0, rows)
    problem = load(accesses, rng.choice(rows * 4, rows, replace=False).astype(np.int64))
    machine = cluster(latency=2e-9 * (1 + case["seed"] % 7), exposed=Exposed(1.0, 1.0, case["sync"]))
    costs = [
        group_cost(problem, np.array(tiers, np.uint8), layout, machine).exposed_seconds
        for tiers in itertools.product((Tier.HOME, *usable_tiers(layout)), repeat=rows)
    ]
    choice = choose_tiers(problem, layout, machine, 100, np.zeros(rows, np.uint8), np.inf)
    assert choice.cost.exposed_seconds == pytest.approx(min(costs), rel=1e-9)
    assert choice.optimum.lower_bound_seconds <= min(costs) * (1 + 1e-12)
