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
from tests.embedding.prefetch.test_run_ahead import check
from tests.support.exactness import Scenario
from tests.support.rank_pool import RankPool
from tests.support.run_ahead_jobs import Loop

pytestmark = pytest.mark.slow

Ranks = Callable[[int], RankPool]
SCENARIO = Scenario(2, 2, "rowwise_adagrad", two_dims=True, seed=5)


def test_only_the_training_thread_issues_collectives_in_one_order(ranks: Ranks) -> None:
    results = ranks(4).run("collective_order_jobs:issued", SCENARIO, Loop(one_thread=True))
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
    pool.run("collective_order_jobs:issued", SCENARIO, Loop(ahead=False))
    assert [made for _, made in pool.run("collective_order_jobs:issued", SCENARIO, Loop(one_thread=True))] == [0] * 4
    two_threads = pool.run("collective_order_jobs:issued", SCENARIO, Loop(one_thread=False))
    assert [made for _, made in two_threads] == [2] * 4, "this rank's node and rail"
    assert {thread for thread, _, _ in two_threads[0][0]} == {"training", "other"}


@pytest.mark.parametrize(
    ("passes", "loop"),
    [
        (1, Loop(one_thread=True)),
        (3, Loop(one_thread=True)),
        (1, Loop(one_thread=True, evaluate_every=2, extra_every=3, save_every=3)),
        pytest.param(1, Loop(one_thread=True, max_norm=0.05), marks=pytest.mark.long),
        pytest.param(1, Loop(one_thread=True, break_at=7), marks=pytest.mark.long),
        (1, Loop(one_thread=True, bad_at=6, loops=3)),
    ],
    ids=["plain", "three passes", "other work", "clip", "break", "bad input"],
)
def test_one_thread_trains_equally(ranks: Ranks, passes: int, loop: Loop) -> None:
    scenario = Scenario(2, 2, "rowwise_adagrad", two_dims=True, passes=passes, steps=12, seed=5)
    results = check(scenario, ranks, loop)
    assert results[0]["versions"][-1] >= 3, "the scenario must really migrate rows"
    assert (results[0]["deferred"] > 0) == (loop.max_norm == 0)


def test_an_error_of_a_loader_is_named_on_every_rank(ranks: Ranks) -> None:
    results = ranks(4).run("run_ahead_jobs:failing_loader", RankLayout(2, 2), 2, 2, True, timeout=60)
    assert [steps for steps, _, _ in results] == [2] * 4
    for rank, (_, text, _) in enumerate(results):
        assert ("OSError: the disk is gone" if rank == 2 else "rank 2: its loader raised an error") in text


def test_a_rank_without_further_batch_is_named_on_every_rank(ranks: Ranks) -> None:
    for steps, text, _ in ranks(4).run("run_ahead_jobs:uneven", RankLayout(2, 2), [4, 4, 3, 4], True, timeout=60):
        assert steps == 3
        assert "rank 2 has no further batch" in text


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
