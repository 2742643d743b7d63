"""``bench_step_plans``: random plans within what tables allow, and the comparison by rank."""

from __future__ import annotations

import bench_step_plans
import bench_step_plans_rank
import numpy as np
import pytest

from flexd.core.layout import RankLayout
from flexd.planner.tables.solve import place_tables, step_seconds
from tests.planner.tables.cases import options_of

LAYOUT = RankLayout(2, 2)


def test_random_plans_are_allowed_and_differ_in_what_they_prefer() -> None:
    tables = options_of(3, 40, LAYOUT, pooled=0.5)
    plans = [bench_step_plans_rank.random_pieces(tables, LAYOUT, np.random.default_rng(at)) for at in range(20)]
    for pieces in plans:
        assert tables.allowed[pieces.table, pieces.option].all()
        places = np.array([tables.options[at].places(LAYOUT) for at in pieces.option.tolist()])
        assert ((pieces.place >= 0) & (pieces.place < places)).all()
    used = {tuple(np.bincount(pieces.option, minlength=len(tables.options)) > 4) for pieces in plans}
    assert len(used) > 5
    again = bench_step_plans_rank.random_pieces(tables, LAYOUT, np.random.default_rng(0))
    np.testing.assert_array_equal(again.option, plans[0].option)


def test_a_plan_is_predicted_as_the_planner_prices_it() -> None:
    tables = options_of(3, 12, LAYOUT)
    placed = place_tables(tables, LAYOUT, 1e12, evaluations=300)
    assert step_seconds(tables, LAYOUT, placed.pieces) == pytest.approx(placed.seconds)


def test_predictions_and_medians_are_compared_by_rank_on_each_link() -> None:
    predicted = [[float(plan), float(-plan)] for plan in range(8)]
    rounds = np.array([1.0, 1.0, 50.0])
    measured = [[(plan + 1) * rounds, (plan + 1) * np.ones(3)] for plan in range(8)]
    measured[3][0] = 4.0 * np.array([1.0, 1.0, 0.001])  # one disturbed round of three
    found = bench_step_plans.compared({"predicted": predicted, "measured": np.array(measured).tolist()})
    assert found["limited"]["rank_correlation"] == pytest.approx(1.0)
    assert found["unlimited"]["rank_correlation"] == pytest.approx(-1.0)
    assert found["limited"]["rounds_correlation"] < 1.0 == pytest.approx(found["unlimited"]["rounds_correlation"])
    assert found["limited"]["measured_seconds"] == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8])
