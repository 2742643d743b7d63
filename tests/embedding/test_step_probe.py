"""What a step takes beside its links: differences within turns, real ranks, budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flexd.core.layout import RankLayout
from flexd.embedding import step_probe
from flexd.embedding.row_optimizers import RowWiseAdagrad
from flexd.embedding.step_probe import FEWEST_TURNS, MOST_TURNS, HomeKernels, StepProbe
from flexd.topology.cluster import StepCosts
from tests.support.rank_pool import RankPool


def step_costs(rank: int, layout: RankLayout, budget_seconds: float) -> tuple[StepCosts, int]:
    """Return the step costs, and how many turns of steps were measured."""
    turns = 0
    measured = step_probe._steps

    def counted(*arguments: Any) -> Any:
        nonlocal turns
        found = measured(*arguments)
        turns = len(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_probe, "_steps", counted)
        costs = step_probe.measure_step_costs(layout, torch.device("cpu"), budget_seconds)
    return costs, turns


def test_costs_are_medians_of_differences_within_turns() -> None:
    # A turn that something disturbs is slower in all three; its differences are not.
    steps = np.array([[1.0, 1.3, 1.1], [5.0, 5.2, 5.4], [1.0, 1.2, 1.2]])
    costs = StepProbe(steps, np.array([0.5, 2.0, 0.4]), 1e9).costs()
    assert costs.sums_seconds == pytest.approx(0.2)
    assert costs.copies_seconds == pytest.approx(0.2)
    assert costs.row_bytes_per_second == pytest.approx(2e9)


def test_ranks_agree_on_positive_costs(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(2).run(step_costs, RankLayout(2, 1), 0.5)
    assert results[0][0] == results[1][0]
    costs, turns = results[0]
    # More collectives and launches never take no time at all on a processor.
    assert costs.sums_seconds > 0
    assert 1e6 < costs.row_bytes_per_second < 1e12
    assert FEWEST_TURNS <= turns <= MOST_TURNS


def test_kernels_of_a_home_sum_bags_and_update_their_rows() -> None:
    ids = np.random.default_rng(0).integers(0, 60, 83)
    kernels = HomeKernels(ids, 60, 8, 20, torch.device("cpu"))
    kernels.step()
    assert not kernels.rows.any(), "a step changes no row"
    kernels.rows.normal_()
    kernels.grads.normal_()
    weight = kernels.rows.clone().requires_grad_()
    offsets = torch.arange(21) * 83 // 20
    wanted = torch.nn.functional.embedding_bag(
        torch.from_numpy(ids), weight, offsets, mode="sum", include_last_offset=True
    )
    torch.testing.assert_close(kernels.sums(), wanted.detach())
    wanted.backward(kernels.grads)
    expected, state = weight.detach().clone(), torch.zeros(60, 1)
    RowWiseAdagrad(lr=0.01).update(expected, state, kernels.slots, weight.grad[kernels.slots], 1)
    kernels.update()
    torch.testing.assert_close(kernels.rows, expected)
    torch.testing.assert_close(kernels.state, state)
    assert not torch.equal(expected, weight.detach())
