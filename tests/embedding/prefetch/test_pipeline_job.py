"""Bytes that steps wait for with the prefetch pipeline, memory that it holds, and its work in the training thread: one
order of collectives on all ranks."""

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
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.exchange import collectives, process_groups
from flexd.embedding.features import Jagged
from flexd.embedding.prefetch.pipeline_job import WorkerThread
from tests.support.exactness import Scenario
from tests.support.prefetch_pipeline_jobs import Loop, pipeline_of, train
from tests.support.rank_pool import Ranks


def count_bytes(rank: int, layout: RankLayout, ids: list[list[list[int]]], exchange: str) -> list[dict[str, Any]]:
    """Return the bytes and the overlapped bytes of each step over ``ids[rank]``."""
    collection = EmbeddingCollection([EmbeddingTable("item", 60, 4)], layout=layout, exchange=exchange)
    loader = [{"item": Jagged(torch.tensor(part), torch.tensor([len(part)]))} for part in ids[rank]]
    traffic = []

    def totals() -> tuple[int, int]:
        pipeline = pipeline_of(collection)
        pipeline.wait()
        return tuple(
            counted.all_to_all_intra_bytes + counted.all_to_all_inter_bytes
            for counted in (collection.traffic, pipeline.overlapped)
        )

    for features in flexd.prefetch(loader, collection):
        before = totals()
        collection(features)["item"].values.sum().backward()
        collection.optimizer.step()
        after = totals()
        traffic.append({"all": after[0] - before[0], "overlapped": after[1] - before[1]})
    return traffic


@pytest.mark.parametrize(("layout", "exchange"), [((2, 1), "chain"), ((2, 2), "chain"), ((2, 2), "direct")])
def test_a_step_waits_only_for_rows_of_both_batches(ranks: Ranks, layout: tuple[int, int], exchange: str) -> None:
    """Rows have 16 bytes. Batches have no row in common at first, then all rows."""
    world = layout[0] * layout[1]
    apart = [[list(range(20 * (step % 3), 20 * (step % 3) + 20)) for step in range(6)]] * world
    for step in ranks(world).run(count_bytes, RankLayout(*layout), apart, exchange)[0][1:-1]:
        assert step["all"] == step["overlapped"] > 0
    results = ranks(world).run(count_bytes, RankLayout(*layout), [[list(range(20))] * 6] * world, exchange)
    for result in results:
        for step in result[1:-1]:
            waited = step["all"] - step["overlapped"]
            assert waited % 16 == 0, "ids are sent ahead"
            assert waited == result[1]["all"] - result[1]["overlapped"] > 0
    # Each rank requests and serves 20 rows in both directions, without the rows that it holds itself.
    if exchange == "direct" or layout == (2, 1):
        waited = sum(result[1]["all"] - result[1]["overlapped"] for result in results)
        assert waited == 2 * 16 * 20 * (world - 1)


def test_held_memory_is_bounded_and_counted() -> None:
    """With the same 30 ids in every batch the held bytes are equal after every step."""
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 50, 4)], layout=RankLayout(1, 1))
    loader = [{"item": flexd.Jagged(torch.arange(30), torch.tensor([30]))} for _ in range(9)]
    pending = []
    for features in flexd.prefetch(loader, collection):
        collection(features)["item"].values.sum().backward()
        collection.optimizer.step()
        pending.append(collection.memory().pending_bytes)
    assert len(set(pending[1:-1])) == 1
    rows, ids = 30 * 4 * 4, 30 * 8
    assert rows + ids <= pending[1] <= 2 * rows + 30 * ids
    marks, keys, slots = 50, 50 * 8, 50 * 8
    assert collection.memory().working_bytes >= marks + 2 * (keys + slots)
    assert collection.memory().pending_bytes < pending[1]


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

    new_subgroup = process_groups.new_subgroup

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        return new_subgroup(*args, **kwargs)

    with (
        mock.patch.object(dist, "all_to_all_single", recorded("all_to_all", dist.all_to_all_single)),
        mock.patch.object(dist, "all_reduce", recorded("all_reduce", dist.all_reduce)),
        mock.patch.object(collectives, "all_gather_flat", recorded("all_gather", collectives.all_gather_flat)),
        mock.patch.object(process_groups, "new_subgroup", counted),
    ):
        train(rank, scenario, loop)
    return record, made


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
    assert [made for _, made in two_threads] == [4] * 4, "this rank's node and rail, each twice"
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


def test_a_job_that_does_not_end_is_an_error_within_the_deadline() -> None:
    release = threading.Event()
    worker: WorkerThread[int] = WorkerThread("test", torch.device("cpu"))
    worker.submit(lambda: int(release.wait(60)))
    with pytest.raises(EmbeddingError, match="test: a job is under way"):
        worker.submit(lambda: 2)
    with pytest.raises(EmbeddingError, match=r"not done after 0\.01 s"):
        worker.result(0.01)
    assert not worker.stop(0.01)
    release.set()
    assert worker.result(60.0) == 1
    worker.submit(lambda: 3)  # a new thread
    assert worker.result(60.0) == 3
    assert worker.stop(60.0)
