"""``state_dict`` of some ranks alone: a warning at the next look-up, an error with a deadline where it would hang."""

from __future__ import annotations

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
