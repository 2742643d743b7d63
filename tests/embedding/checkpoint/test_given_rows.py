"""Rows that a caller gives: the same on every rank, or of one; a wrong one is refused on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexd.core.layout import RankLayout
from tests.support import given_rows_jobs
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
FOUR_RANKS = RankLayout(2, 2)


@pytest.mark.parametrize(("source", "given", "window_bytes"), [(0, "none", 300), (3, "others", 2**20)])
def test_rows_of_one_rank_reach_their_homes(ranks: Ranks, source: int, given: str, window_bytes: int) -> None:
    assert all(ranks(4).run(given_rows_jobs.load_from, FOUR_RANKS, source, given, window_bytes))


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ("seed", "table 'item', from row 3 on: ranks [2] gave other values than rank 0"),
        ("one bit", "table 'item', from row 3 on: ranks [2] gave other values than rank 0"),
        ("order", "table 'item', from row 3 on: ranks [2] gave other values than rank 0"),
        ("count", "table 'item', from row 3 on: ranks [2] gave other values than rank 0"),
        ("rows", "ranks [2] load another table, other rows or from another source than rank 0"),
        ("table", "ranks [2] load another table, other rows or from another source than rank 0"),
        ("source", "ranks [2] load another table, other rows or from another source than rank 0"),
        ("none", "table 'item': ranks [2] gave no values - give the same values on every rank"),
        ("shape", "table 'item': the values of rank 2 do not fit - see the error of rank 2"),
        ("empty source", "table 'item': rank 2 is the source and gave no values - give values on rank 2"),
    ],
)
def test_a_mistake_of_one_rank_is_refused_on_every_rank(ranks: Ranks, mistake: str, cause: str) -> None:
    results = ranks(4).run(given_rows_jobs.load_differing, FOUR_RANKS, mistake, timeout=60)
    for rank, (text, unchanged) in enumerate(results):
        if mistake == "shape" and rank == 2:
            assert "rank 2: table 'item': values of shape (20, 5) from row 3 on, in 61 rows of 8" in text
        else:
            assert cause in text
        assert unchanged
    if mistake == "seed":
        assert results[0][0].endswith("load those of one rank with source=0")
