"""``flexd.prefetch``: its loaders, arguments and loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from tests.support import run_ahead_jobs
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("batches", [[3, 3, 2, 3], [0, 1, 1, 1], [1, 0, 0, 0], [5, 4, 4, 2]])
def test_uneven_loaders_are_an_error_on_every_rank(ranks: Ranks, batches: list[int]) -> None:
    results = ranks(4).run(run_ahead_jobs.uneven, RankLayout(2, 2), batches)
    for steps, text, threads in results:
        assert steps == min(batches)
        named = int(text.split()[1])
        assert f"rank {named} has no further batch, other ranks have" in text
        assert batches[named] == min(batches)
        assert threads == []


@pytest.mark.parametrize(("failing", "after"), [(2, 3), (0, 1), (3, 0)])
def test_the_error_of_a_loader_ends_the_loop_of_every_rank(ranks: Ranks, failing: int, after: int) -> None:
    """The batches before it are trained. Nobody waits for a deadline."""
    results = ranks(4).run(run_ahead_jobs.failing_loader, RankLayout(2, 2), failing, after, timeout=60)
    for rank, (steps, text, threads) in enumerate(results):
        assert steps == after
        assert threads == []
        if rank == failing:
            assert text == "OSError: the disk is gone"
        else:
            assert text.startswith(f"EmbeddingError: rank {failing}: its loader raised an error")


@pytest.mark.parametrize("wrong", [{"passes_per_step": 0}, {"timeout_seconds": 0.0}, {"timeout_seconds": float("nan")}])
def test_wrong_arguments_are_refused(wrong: dict[str, float]) -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 5, 4)], layout=RankLayout(1, 1))
    with pytest.raises(EmbeddingError, match="give positive numbers"):
        flexd.prefetch([], collection, **wrong)


def test_a_second_loop_at_a_time_is_refused() -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 5, 4)], layout=RankLayout(1, 1))
    first = iter(flexd.prefetch([{}, {}], collection))
    next(first)
    with pytest.raises(EmbeddingError, match="another loop over prefetched batches"):
        next(iter(flexd.prefetch([{}], collection, timeout_seconds=5.0)))
    first.close()
    assert list(flexd.prefetch([{}], collection)) == [{}]
