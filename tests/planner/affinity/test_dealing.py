"""Dealing gives equal numbers, at the least cost that exchanges reach."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flexd.planner.affinity.dealing import deal


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_every_group_is_dealt_in_equal_numbers(nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    groups = rng.integers(0, 7, 500)
    to = deal(rng.random((500, nodes), dtype=np.float32), groups)
    dealt = np.bincount(groups * nodes + to, minlength=7 * nodes).reshape(7, nodes)
    assert dealt.sum() == 500
    assert (dealt.max(axis=1) - dealt.min(axis=1) <= 1).all()
    assert np.ptp(dealt.sum(axis=0)) <= 1


def test_two_nodes_are_dealt_at_least_cost():
    rng = np.random.default_rng(0)
    for _ in range(20):
        costs = rng.random((8, 2), dtype=np.float32)
        each = np.arange(8)
        least = min(
            costs[each, [int(i in left) for i in range(8)]].sum() for left in itertools.combinations(range(8), 4)
        )
        assert costs[each, deal(costs, np.zeros(8, dtype=np.int64))].sum() == pytest.approx(least, abs=1e-5)
