"""What affinity sends, counted, and where it says "no gain expected"."""

from __future__ import annotations

import numpy as np

from flexd.core.layout import RankLayout
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.traffic import crossing_rows, rule_nodes

LAYOUT = RankLayout(2, 2)


def test_rows_that_cross_are_counted_once_a_node_and_batch():
    samples = SampleRows.of(np.array([0, 0, 1, 1, 2, 3]), np.array([0, 2, 0, 2, 0, 0]))
    batch, to = np.array([0, 0, 0, 1]), np.array([1, 0, 1, 1])
    # Key 0 is at home in node 0, key 2 in node 1: batch 0 sends 0 to node 1 and 2 to node 0, batch 1 sends 0 to node 1.
    assert crossing_rows(samples, batch, to, np.array([0, 1]), 2) == 3
    assert rule_nodes(np.array([0, 1, 2, 3, 4]), LAYOUT).tolist() == [0, 0, 1, 1, 0]
