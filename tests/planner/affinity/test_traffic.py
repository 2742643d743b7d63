"""What affinity sends, counted, and where it says "not here"."""

from __future__ import annotations

import numpy as np

from flexd.core.layout import RankLayout
from flexd.planner.affinity.partition import learn_homes
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.traffic import crossing_rows, rule_nodes
from flexd.planner.affinity.user_nodes import assign_users

LAYOUT = RankLayout(2, 2)


def drawn(groups: int, rows: int, samples: int = 2560, length: int = 8) -> tuple[SampleRows, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    group = rng.integers(0, groups, samples)
    keys = rng.permutation(groups * rows)[group[:, None] * rows + rng.integers(0, rows, (samples, length))]
    return SampleRows.of(np.repeat(np.arange(samples), length), keys.reshape(-1)), np.arange(samples) // 64, group


def test_rows_that_cross_are_counted_once_a_node_and_batch():
    samples = SampleRows.of(np.array([0, 0, 1, 1, 2, 3]), np.array([0, 2, 0, 2, 0, 0]))
    batch, to = np.array([0, 0, 0, 1]), np.array([1, 0, 1, 1])
    # Key 0 is at home in node 0, key 2 in node 1: batch 0 sends 0 to node 1 and 2 to node 0, batch 1 sends 0 to node 1.
    assert crossing_rows(samples, batch, to, np.array([0, 1]), 2) == 3
    assert rule_nodes(np.array([0, 1, 2, 3, 4]), LAYOUT).tolist() == [0, 0, 1, 1, 0]


def test_users_go_to_the_node_of_their_rows_in_equal_numbers_of_samples():
    window, batch, group = drawn(16, 60)
    rule = rule_nodes(window.keys, LAYOUT)
    homes = learn_homes(window, batch, rule, LAYOUT.nodes)
    ids, node = assign_users(window, group * 10, homes, rule, slack=0.1)
    assert ids.tolist() == (np.arange(16) * 10).tolist()
    at = node[group]
    assert np.bincount(at, minlength=2).max() <= 1.1 * len(window) / 2
    by_user = crossing_rows(window, batch, at, homes.home_of(window.keys, rule), 2)
    assert by_user < 0.2 * crossing_rows(window, batch, np.arange(len(window)) % 2, rule, 2)
