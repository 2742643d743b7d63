"""Profiles counted exactly from the accesses of some steps."""

from __future__ import annotations

import numpy as np

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.simulate.step_keys import exact_profile


def test_every_row_is_listed_with_its_share_of_its_table() -> None:
    keyspace = KeySpace([TableSpec("a", 4, 4), TableSpec("b", 4, 4), TableSpec("c", 4, 4)])
    first = keyspace.first_key
    keys = [[[0, 1, 1], [1]], [[int(first[2]) + 3, 1], []]]
    profile = exact_profile([[np.array(rank, np.int64) for rank in step] for step in keys], keyspace)
    a, b, c = profile.tables
    assert a.hot_rows.tolist() == [1, 0]
    assert a.hot_share.tolist() == a.hot_lower.tolist() == a.hot_upper.tolist() == [0.8, 0.2]
    assert (a.weight, a.accesses_per_step, a.coverage, a.distinct_rows) == (5.0, 2.5, 1.0, 2.0)
    assert (len(b.hot_rows), b.weight, b.coverage) == (0, 0.0, 0.0)
    assert (c.hot_rows.tolist(), c.accesses_per_step) == ([3], 0.5)
    assert profile.samples == 6


def test_touches_are_means_over_ranks_nodes_and_steps() -> None:
    keyspace = KeySpace([TableSpec("t", 4, 4)])
    steps = [[[0, 0, 1], [0], [2], []], [[0], [], [], [1]]]
    profile = exact_profile([[np.array(rank, np.int64) for rank in step] for step in steps], keyspace, RankLayout(2, 2))
    (table,) = profile.tables
    assert table.touches is not None
    assert table.hot_rows.tolist() == [0, 1, 2]
    assert table.touches.per_rank.tolist() == [3 / 8, 2 / 8, 1 / 8]
    assert table.touches.per_node.tolist() == [2 / 4, 2 / 4, 1 / 4]
    assert table.touches.anywhere.tolist() == [2 / 2, 2 / 2, 1 / 2]
    passes = exact_profile(
        [[np.array(rank, np.int64) for rank in keys] for keys in steps], keyspace, RankLayout(2, 2), micro_batches=2
    ).tables[0]
    assert passes.accesses_per_step == 2 * table.accesses_per_step, "two passes are one step"
    assert passes.touches is not None
    assert passes.touches.per_rank.tolist() == table.touches.per_rank.tolist(), "touches are of a pass"
