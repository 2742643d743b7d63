"""Bytes that affinity sends, counted, and where it says "no gain expected"."""

from __future__ import annotations

import numpy as np

from flexd.core.layout import RankLayout
from flexd.planner.affinity.traffic import crossing_rows, rule_nodes
from flexd.planner.affinity.window import SampleRows

LAYOUT = RankLayout(2, 2)


def test_rows_that_cross_are_counted_once_a_node_by_their_weight():
    samples = SampleRows.of(np.array([0, 0, 1, 1, 2]), np.array([0, 2, 0, 2, 0]))
    # Key 0 is at home in node 0, key 2 in node 1: 0 is sent to node 1, 2 to node 0.
    weight = np.array([1.0, 0.5], dtype=np.float32)
    assert crossing_rows(samples, np.array([1, 0, 1]), np.array([0, 1]), weight) == 1.5
    assert rule_nodes(np.array([0, 1, 2, 3, 4]), LAYOUT).tolist() == [0, 0, 1, 1, 0]
