"""Nodes of users learnt from a trace: users with equal tastes meet, and that saves rows."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.errors import ConfigError
from flexd.core.layout import RankLayout
from flexd.planner.affinity.user_nodes import learn_user_nodes
from flexd.stream.trace import Trace


def trace_of(users: int, events: int, groups: int, *, with_users: bool = True) -> Trace:
    """Make users of groups that read 40 rows each."""
    rng = np.random.default_rng(0)
    user = rng.permutation(np.repeat(np.arange(users), events))
    row = user % groups * 40 + rng.integers(0, 40, len(user))
    seconds = np.arange(len(user), dtype=np.float64)
    rows = np.array([groups * 40])
    return Trace(np.zeros_like(row), row, seconds, user if with_users else None, rows, ("items",))


def test_users_of_a_group_meet_in_a_node_and_save_rows() -> None:
    learnt = learn_user_nodes(trace_of(64, 32, 2), RankLayout(2, 2), 32, 4)
    assert learnt.samples == 64 * 8
    nodes = learnt.users.node_of(np.arange(64))
    for group in range(2):
        most = np.bincount(nodes[group::2], minlength=2).max()
        assert most >= 30
    assert abs(int(nodes.sum()) - 32) <= 2
    assert learnt.rows_ratio is not None
    assert learnt.rows_ratio < 0.85


def test_traces_without_users_or_long_histories_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no users"):
        learn_user_nodes(trace_of(8, 8, 2, with_users=False), RankLayout(2, 1), 8, 4)
    with pytest.raises(ConfigError, match="no user has 9 events"):
        learn_user_nodes(trace_of(8, 8, 2), RankLayout(2, 1), 8, 9)
