"""Prefetch pipeline in the training thread: one order of collectives on all ranks, and the same training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.embedding import devices
from flexd.embedding.exchange import collectives, job_groups
from tests.support.exactness import Scenario
from tests.support.prefetch_pipeline_jobs import Loop, pipeline_of, train
from tests.support.rank_pool import RankPool

Issued = tuple[str, tuple[int, ...], str]


def issued(rank: int, scenario: Scenario, loop: Loop) -> tuple[list[Issued], int]:
    """Train; return (thread, ranks of the group, operation) of each collective, and the number of new groups."""
    record: list[Issued] = []
    made = 0

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*args: Any, **kwargs: Any) -> Any:
            thread = "training" if threading.current_thread() is threading.main_thread() else "other"
            record.append((thread, tuple(dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)), name))
            return call(*args, **kwargs)

        return issue

    new_subgroup = job_groups.new_subgroup

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        return new_subgroup(*args, **kwargs)

    with (
        mock.patch.object(dist, "all_to_all_single", recorded("all_to_all", dist.all_to_all_single)),
        mock.patch.object(dist, "all_reduce", recorded("all_reduce", dist.all_reduce)),
        mock.patch.object(collectives, "all_gather_flat", recorded("all_gather", collectives.all_gather_flat)),
        mock.patch.object(job_groups, "new_subgroup", counted),
    ):
        train(rank, scenario, loop)
    return record, made


pytestmark = pytest.mark.slow

Ranks = Callable[[int], RankPool]
SCENARIO = Scenario(2, 2, "rowwise_adagrad", two_dims=True, seed=5)


def test_only_the_training_thread_issues_collectives_in_one_order(ranks: Ranks) -> None:
    results = ranks(4).run(issued, SCENARIO, Loop(one_thread=True))
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
    pool.run(issued, SCENARIO, Loop(ahead=False))
    assert [made for _, made in pool.run(issued, SCENARIO, Loop(one_thread=True))] == [0] * 4
    two_threads = pool.run(issued, SCENARIO, Loop(one_thread=False))
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
        assert getattr(pipeline_of(collection), "one_thread", False)
        batches.close()
