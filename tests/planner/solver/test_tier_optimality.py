"""The optimiser with fixed costs against brute force; with limits, ``test_limits`` has an exact MILP."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.cost import usable_tiers
from flexd.topology.cluster import Exposed
from tests.support.planner_cases import choose_tiers, cluster, group_cost, load

LAYOUTS = [RankLayout(2, 2), RankLayout(3, 2), RankLayout(1, 4), RankLayout(4, 1), RankLayout(2, 3)]


problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "layout": st.sampled_from(LAYOUTS),
        "sync": st.sampled_from([0.3, 0.6, 1.0]),
        "scale": st.floats(0.02, 3.0),
    }
)


def make(case: dict, rows: int):
    rng = np.random.default_rng(case["seed"])
    accesses = case["scale"] * rng.pareto(1.0, rows)
    keys = rng.choice(rows * 4, rows, replace=False).astype(np.int64)
    return load(accesses, keys), cluster(exposed=Exposed(1.0, 1.0, case["sync"]))


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
    assert choice.optimum.lower_bound_seconds <= min(costs) * (1 + 1e-12)
