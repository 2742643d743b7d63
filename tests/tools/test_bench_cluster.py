"""The benchmark of exchange strategies: its batches and its bound."""

from __future__ import annotations

import numpy as np
import pytest

from tools.bench.workloads import Setting, batches_of, bounds, exact_profile, keys_of

pytestmark = pytest.mark.alone

SMALL = Setting(nodes=3, local_ranks=2, rows=120, dim=8, tables=4, samples=5, length=6, batches=3)


def test_positions_find_their_rows_again() -> None:
    whole = Setting(rows=40, tables=1, samples=4, length=5, batches=1)
    dealt = Setting(rows=40, tables=4, samples=4, length=5, batches=1)
    drawn = batches_of(whole, 0)[0].values[0]
    batch = batches_of(dealt, 0)[0]
    table = np.repeat(np.arange(4), [len(values) for values in batch.values])
    assert ((np.concatenate(batch.values) * 4 + table)[batch.order] == drawn).all()
    assert [lengths.sum() for lengths in batch.lengths] == [len(values) for values in batch.values]
    assert (np.sum(batch.lengths, axis=0) == 5).all()
    assert [np.bincount(drawn[5 * s : 5 * s + 5] % 4, minlength=4)[2] for s in range(4)] == batch.lengths[2].tolist()


def test_ranks_and_steps_have_batches_of_their_own() -> None:
    drawn = [tuple(keys_of(SMALL, batch)) for rank in range(6) for batch in batches_of(SMALL, rank)]
    assert len(set(drawn)) == 18
    assert [tuple(keys_of(SMALL, batch)) for batch in batches_of(SMALL, 4)] == drawn[12:15]


def test_bounds_count_rows_a_node_touches_and_does_not_home() -> None:
    touched: list[list[set[int]]] = []
    for step in range(3):
        of_rank = [set(keys_of(SMALL, batches_of(SMALL, rank)[step]).tolist()) for rank in range(6)]
        touched.append([of_rank[2 * node] | of_rank[2 * node + 1] for node in range(3)])
    crossing = fetched_late = pushed_early = 0
    for step in range(3):
        before, after = set.union(*touched[step - 1]), set.union(*touched[(step + 1) % 3])
        for node in range(3):
            far = {key for key in touched[step][node] if (key % 6) // 2 != node}
            crossing += len(far)
            fetched_late += len(far & before)
            pushed_early += len(far & after)
    assert fetched_late != pushed_early
    assert bounds(SMALL).volume == pytest.approx(crossing / 3 * 2 * 8 * 4)
    assert bounds(SMALL).between_steps == pytest.approx((fetched_late + pushed_early) / 3 * 8 * 4)


def test_profile_is_the_popularity_that_batches_are_drawn_from() -> None:
    profile = exact_profile(SMALL)
    share = np.zeros(SMALL.rows)
    for table, of_table in enumerate(profile.tables):
        share[of_table.hot_rows * 4 + table] = of_table.hot_share * of_table.accesses_per_step
    assert share / (5 * 6 * 6) == pytest.approx(SMALL.share())
    assert all((np.diff(of_table.hot_share) <= 0).all() for of_table in profile.tables)
