"""Small windows against exhaustive searches: rows that cross, homes, and dealing in equal numbers at least cost."""

import itertools

import numpy as np
import pytest

from flexd.core.placement import RankLayout
from flexd.planner.affinity import partition
from flexd.planner.affinity.outlook import crossing_rows, rule_nodes
from flexd.planner.affinity.partition import deal, learn_homes
from flexd.planner.affinity.window import RowCosts, SampleRows

LAYOUT = RankLayout(2, 2)


def test_rows_that_cross_are_counted_once_a_node_by_their_weight():
    samples = SampleRows.of(np.array([0, 0, 1, 1, 2]), np.array([0, 2, 0, 2, 0]))
    # Key 0 is at home in node 0, key 2 in node 1: 0 is sent to node 1, 2 to node 0.
    assert crossing_rows(samples, np.array([1, 0, 1]), np.array([0, 1]), np.array([1.0, 0.5], dtype=np.float32)) == 1.5
    assert rule_nodes(np.array([0, 1, 2, 3, 4]), LAYOUT).tolist() == [0, 0, 1, 1, 0]


def test_a_small_window_is_divided_as_well_as_an_exhaustive_search_divides_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(partition, "ROW_SLACK", 9)
    monkeypatch.setattr(partition, "LOAD_SLACK", 9)
    rng = np.random.default_rng(6)
    found = best = 0.0
    for _ in range(10):
        keys = rng.integers(0, 12, (10, 3))
        window = SampleRows.of(np.repeat(np.arange(10), 3), keys.reshape(-1))
        zero, rule = np.zeros(10, dtype=np.int64), np.zeros(len(window.keys), dtype=np.int64)
        ones = np.ones(len(window.keys), dtype=np.float32)
        costs = RowCosts(ones, 0 * ones, ones)

        def crossing(left: tuple[int, ...], window: SampleRows = window) -> float:
            to = np.isin(np.arange(10), left).astype(np.int64)
            used = np.zeros((len(window.keys), 2), dtype=np.bool_)
            used[window.rows, to[window.samples]] = True
            return float((used.sum(axis=1) - 1).sum())

        best += min(crossing(left) for left in itertools.combinations(range(10), 5))
        found += min(learn_homes(window, zero, rule, 2, costs, seed=seed).crossing for seed in range(8))
    assert found <= 1.15 * best + 1e-3


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
