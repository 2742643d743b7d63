"""``state_dict`` of some ranks alone: a warning at the next look-up, an error with a deadline where it would hang."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from flexd.core.layout import RankLayout
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("layout", [RankLayout(1, 3), RankLayout(3, 1)])
def test_ranks_that_save_alone_are_warned_once(ranks: Ranks, layout: RankLayout) -> None:
    zero, *others = ranks(3).run("given_rows_jobs:saves_alone", layout, [0])
    assert len(zero) == 1
    assert zero[0].startswith(
        "rank 0: state_dict() was called here and not on ranks [1, 2]: it has 29 of 87 rows, those with their home on "
        "rank 0: of it alone no table can be loaded - call state_dict() on every rank"
    )
    assert "flexd.CheckpointSeries, flexd.save_checkpoint or flexd.ShardedState" in zero[0]
    assert others == [[], []]


def test_no_rank_is_warned_where_all_save(ranks: Ranks) -> None:
    assert ranks(3).run("given_rows_jobs:saves_alone", RankLayout(1, 3), [0, 1, 2]) == [[], [], []]


def test_a_rank_that_saves_alone_in_a_loop_does_not_hang() -> None:
    pool = RankPool(2)  # of its own: the process groups are of no use afterwards
    try:
        zero, one = pool.run("given_rows_jobs:saves_alone_in_a_loop", RankLayout(1, 2), [0], timeout=60)
    finally:
        pool.close()
    cause = (
        r"rank 0: state_dict\(\) in a loop of flexd.prefetch, or with rows in other nodes than their home, exchanges "
        r"rows with all ranks \(all_to_all\), and ranks \[1\] have not called it after \d+ s; it has 44 of 87 rows"
    )
    assert re.search(cause, zero["text"])
    assert "call state_dict() on every rank" in zero["text"]
    assert len(zero["warnings"]) == 1
    assert re.search(cause, zero["warnings"][0])
    assert re.search(cause.partition(",")[0], one["text"]), "the other rank is told why"


def test_all_ranks_save_in_a_loop(ranks: Ranks) -> None:
    for result in ranks(2).run("given_rows_jobs:saves_alone_in_a_loop", RankLayout(1, 2), [0, 1], timeout=60):
        assert result == {"text": "ended", "warnings": []}
