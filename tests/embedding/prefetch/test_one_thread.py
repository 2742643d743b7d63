"""Run-ahead in the training thread: one order of collectives on all ranks, and the same training."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from flexd.embedding import devices
from tests.support import collective_order_jobs
from tests.support.exactness import Scenario
from tests.support.rank_pool import RankPool
from tests.support.run_ahead_jobs import Loop

pytestmark = pytest.mark.slow

Ranks = Callable[[int], RankPool]
SCENARIO = Scenario(2, 2, "rowwise_adagrad", two_dims=True, seed=5)


def test_only_the_training_thread_issues_collectives_in_one_order(ranks: Ranks) -> None:
    results = ranks(4).run(collective_order_jobs.issued, SCENARIO, Loop(one_thread=True))
    for rank, (record, _) in enumerate(results):
        assert {thread for thread, _, _ in record} == {"training"}
        for other, (theirs, _) in enumerate(results):
            assert [each for each in record if other in each[1]] == [each for each in theirs if rank in each[1]]
    # Replay: a collective runs when it is the next one of every rank of its group, as if each of them waited in it.
    left = [list(reversed(record)) for record, _ in results]
    while any(left):
        ready = next(
            (rest[-1] for rest in left if rest and all(left[member][-1:] == rest[-1:] for member in rest[-1][1])), None
        )
        assert ready is not None, f"ranks wait for each other in {[rest[-1:] for rest in left]}"
        for member in ready[1]:
            left[member].pop()


def test_one_thread_makes_no_process_groups_of_its_own(ranks: Ranks) -> None:
    pool = ranks(4)
    pool.run(collective_order_jobs.issued, SCENARIO, Loop(ahead=False))
    assert [made for _, made in pool.run(collective_order_jobs.issued, SCENARIO, Loop(one_thread=True))] == [0] * 4
    two_threads = pool.run(collective_order_jobs.issued, SCENARIO, Loop(one_thread=False))
    assert [made for _, made in two_threads] == [2] * 4, "this rank's node and rail"
    assert {thread for thread, _, _ in two_threads[0][0]} == {"training", "other"}


def test_an_accelerator_always_uses_one_thread() -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 50, 4)], layout=RankLayout(1, 1))
    loader = [{"item": flexd.Jagged(torch.arange(3), torch.tensor([3]))}]
    with mock.patch.object(devices, "in_host_memory", return_value=False):
        with pytest.raises(EmbeddingError, match="not in host memory"):
            next(iter(flexd.prefetch(loader, collection, one_thread=False)))
        batches = iter(flexd.prefetch(loader, collection))
        assert next(batches) is loader[0]
        assert collection.engine.hooks.one_thread
        batches.close()
