"""False decisions of the switchback in simulated jobs."""

from __future__ import annotations

import pytest
from bench_switchback import SCENARIOS, rates

from flexd.planner.switchback import SwitchbackRule

RULE = SwitchbackRule(16, confidence=0.95, resolution=0.005)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_verdicts_are_right_whatever_the_load_does(scenario: str) -> None:
    assert rates(scenario, 0.0, 60, RULE, seed=1)["wrong"] <= 0.1, "at most 0.05 expected"
    assert rates(scenario, 0.05, 20, RULE, seed=2)["wrong"] <= 0.05, "slower plans stay"
    assert rates(scenario, -0.05, 20, RULE, seed=3)["wrong"] <= 0.05, "faster plans are rolled back"
