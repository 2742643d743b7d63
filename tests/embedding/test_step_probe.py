"""The cost of a step beside its links: differences within turns, real ranks, budgets."""

import numpy as np
import pytest
import torch

from flexd.core.placement import RankLayout
from flexd.embedding import step_probe
from flexd.topology.cluster import StepCosts
from tests.support.rank_pool import Ranks


def measured(rank: int, layout: RankLayout, budget_seconds: float) -> StepCosts:
    return step_probe.measure_step_costs(layout, torch.device("cpu"), budget_seconds)


def test_costs_are_medians_of_differences_within_turns() -> None:
    # A turn that something disturbs is slower in all three; its differences are not.
    steps = np.array([[1.0, 1.3, 1.1], [5.0, 5.2, 5.4], [1.0, 1.2, 1.2]])
    costs = step_probe.step_costs(steps, np.array([0.5, 2.0, 0.4]), 1e9)
    found = [costs.sums_seconds, costs.copies_seconds, costs.row_bytes_per_second]
    assert found == pytest.approx([0.2, 0.2, 2e9])


def test_ranks_agree_on_positive_costs(ranks: Ranks) -> None:
    costs, other = ranks(2).run(measured, RankLayout(2, 1), 0.5)
    assert costs == other
    # More collectives and launches never take no time at all on a processor.
    assert costs.sums_seconds > 0
    assert 1e6 < costs.row_bytes_per_second < 1e12
