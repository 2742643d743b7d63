"""Rows that live in other nodes than their homes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.support import moved_jobs, run_ahead_jobs
from tests.support.exactness import Scenario
from tests.support.rank_pool import RankPool
from tests.support.run_ahead_jobs import Loop

Ranks = Callable[[int], RankPool]
MOVED = Scenario(2, 2, "adam", moved=True, replica_fraction=1.0, two_dims=True, passes=3)


@pytest.mark.parametrize(
    "loop",
    [
        Loop(ahead=True, read_every=2, max_norm=0.05),
        Loop(ahead=False, save_every=3),
        Loop(ahead=True, save_every=2, evaluate_every=2),
    ],
    ids=["gathered and clipped", "saved and loaded", "saved and loaded ahead"],
)
def test_moved_rows_are_read_clipped_saved_and_loaded_as_all_others(ranks: Ranks, loop: Loop) -> None:
    """Losses hold what is read: norms, tables and evaluations too."""
    scenario = replace(MOVED, passes=1)
    pool = ranks(4)
    moved = pool.run(run_ahead_jobs.train, scenario, loop)
    still = pool.run(run_ahead_jobs.train, replace(scenario, moved=False, replica_fraction=0.0), loop)
    for one, other in zip(moved, still, strict=True):
        assert one["most_moved"] > 5
        assert other["most_moved"] == 0
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=0, atol=1e-9)
        for name, table in other["tables"].items():
            np.testing.assert_allclose(one["tables"][name], table, rtol=0, atol=1e-9)


def test_what_is_loaded_replaces_moved_rows_and_no_others(ranks: Ranks) -> None:
    for first, set_rows, trained, loaded, looked_up in ranks(2).run(moved_jobs.load):
        assert not set_rows["shop"].any()
        assert not np.equal(set_rows["item"], first["item"]).any(), "moved rows keep what they learnt"
        assert not np.equal(trained["item"], set_rows["item"]).any()
        for name, table in first.items():
            np.testing.assert_array_equal(loaded[name], table)
            np.testing.assert_array_equal(looked_up[name], table)


def test_the_host_waits_for_nothing_more_where_rows_have_moved(ranks: Ranks) -> None:
    pool = ranks(2)
    for still, moved in zip(
        pool.run(moved_jobs.launches_and_waits, False), pool.run(moved_jobs.launches_and_waits, True), strict=True
    ):
        assert moved[1] == still[1]
        assert still[0] < moved[0] <= still[0] + 2 * 22, "22 kernels a station, whatever the tables"
