"""Collectives that the probe times: their bytes, the groups, and disagreements between ranks."""

from __future__ import annotations

from flexd.core.layout import RankLayout
from tests.support import probe_jobs
from tests.support.rank_pool import RankPool


def test_stated_bytes_equal_the_sent_bytes(pool: RankPool) -> None:
    for layout in (RankLayout(2, 2), RankLayout(1, 4)):
        for rows in pool.run(probe_jobs.bytes_sent, layout, [1, 1000, 4099, 65_536]):
            assert rows
            for name, requested, stated, sent in rows:
                assert stated == sent, name
                assert requested <= stated <= requested + 4 * 2 * layout.world_size, name


def test_different_layouts_are_refused_on_every_rank(pool: RankPool) -> None:
    texts = pool.run(probe_jobs.groups_of, {rank: RankLayout(2, 2) for rank in (0, 1, 2)} | {3: RankLayout(4, 1)})
    assert all("layout of rank 3 is [4.0, 1.0], of rank 0 [2.0, 2.0]" in text for text in texts)


def test_groups_have_the_ranks_of_a_node_and_of_a_rail(pool: RankPool) -> None:
    assert pool.run(probe_jobs.groups_of, dict.fromkeys(range(4), RankLayout(2, 2))) == [
        "node [0, 1], rail [0, 2], max 3.0, of rank 0 10.0",
        "node [0, 1], rail [1, 3], max 3.0, of rank 0 10.0",
        "node [2, 3], rail [0, 2], max 3.0, of rank 0 10.0",
        "node [2, 3], rail [1, 3], max 3.0, of rank 0 10.0",
    ]
    assert pool.run(probe_jobs.groups_of, dict.fromkeys(range(4), RankLayout(4, 1)))[2] == (
        "node None, rail [0, 1, 2, 3], max 3.0, of rank 0 10.0"
    )
