"""Number of collectives of a step, bytes of several passes, and rows rounded to the wire."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexd.core.layout import RankLayout
from tests.support import exchange_jobs
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("dims", "dtypes", "training"),
    [
        ([8], ["float32"], [9, 1, 0]),
        ([8, 4, 2], ["float32"] * 3, [9, 1, 0]),
        ([8, 3], ["float32", "float64"], [9, 2, 0]),
        ([8, 3], ["float16", "bfloat16"], [10, 0, 0]),
        ([8, 3], ["float16", "float64"], [10, 1, 0]),
    ],
    ids=["one group", "three groups", "two dtypes", "two narrow dtypes", "narrow and wide"],
)
def test_collectives_of_a_step(ranks: Ranks, dims: list[int], dtypes: list[str], training: list[int]) -> None:
    """Each of two hops exchanges sizes, ids, rows and gradients. With copies, the first hop returns sums, and the
    second has an all-reduce, or sums from the homes where an all-reduce would add rounded gradients."""
    for moved, trained in ((False, [8, 0, 0]), (True, training)):
        for counts in ranks(4).run(exchange_jobs.collectives, RankLayout(2, 2), dims, dtypes, moved):
            assert counts == {"training": trained, "evaluation": [6, 0, 0]}


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_chunk_adds_no_collective(ranks: Ranks, nodes: int, trains: bool) -> None:
    """The rows of a chunk travel with those of the pass that applies it, and all copies have them after it."""
    for counted in ranks(4).run(exchange_jobs.collectives_of_a_chunk, RankLayout(nodes, 4 // nodes), [8, 3], trains):
        applying, after = counted["collectives"]
        assert counted["versions"] == [2, 2], "the chunk was not applied in the first pass"
        assert applying == after
        assert applying["all_gather_flat"] == 0
        assert counted["bit_equal"] == [True, True]
        assert counted["migrated"] > 0
        assert counted["listed"] == 80
        assert trains or counted["equal"]
