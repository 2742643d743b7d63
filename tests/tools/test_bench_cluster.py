"""The benchmark of exchange strategies: its batches and its bound."""

from __future__ import annotations

import pytest

from tools.bench.workloads import Setting, batches_of, bounds, keys_of

pytestmark = pytest.mark.alone

SMALL = Setting(nodes=3, local_ranks=2, rows=120, dim=8, tables=4, samples=5, length=6, batches=3)


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
