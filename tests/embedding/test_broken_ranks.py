"""A fault of one rank is an error on all ranks that names it, within the process group's timeout."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import Delta, RankLayout, Tier
from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.features import Jagged
from flexd.embedding.prefetch.loop import prefetch
from tests.support.prefetch_pipeline_jobs import pipeline_of
from tests.support.rank_pool import RankPool, Ranks, error_of

IDS = {"item": Jagged(torch.arange(50), torch.tensor([50]))}


def _step(collection: EmbeddingCollection, ids: dict[str, Jagged] = IDS) -> None:
    collection(ids)["item"].values.sum().backward()
    collection.optimizer.step()


def lose_a_rank(rank: int, layout: RankLayout, victim: int, fault: str, timeout_seconds: float) -> str:
    """Train; the victim ends, hangs or does one more forward pass. Return the error of this rank."""
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)
    _step(collection)
    # Set after the first step: on a busy machine processes may start more slowly than this timeout.
    for group in collection._groups._set.groups:
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=timeout_seconds))
    if rank == victim and fault == "dies":
        os._exit(1)

    def train() -> None:
        if rank == victim and fault == "hangs":
            time.sleep(3 * timeout_seconds)
        if rank == victim and fault == "extra look-up":
            with torch.no_grad():
                collection(IDS)
        for _ in range(3):
            _step(collection)

    return error_of(train)


def diverge(rank: int, layout: RankLayout, odd: int, fault: str, exchange: str) -> tuple[str, bool]:
    """Let one rank diverge from the rest; return the error of this rank, and whether all can continue."""
    collection = EmbeddingCollection(
        [EmbeddingTable("item", 50, 4)], layout=layout, exchange=exchange, replica_slots=[20]
    )
    keys = np.arange(20, dtype=np.int64)
    collection.engine.inbox.offer(1, Delta(keys, np.zeros(20, np.uint8), np.full(20, Tier.DEVICE, np.uint8)))
    for _ in range(3):
        _step(collection)
    if rank == odd and fault == "evaluates":
        collection.eval()
    if rank == odd and fault == "skips a step":
        collection.engine.steps += 1
    text = error_of(lambda: collection(IDS))
    collection.train()
    if rank == odd and fault == "skips a step":
        collection.engine.steps -= 1
    _step(collection)
    return text, collection.replicas_bit_equal()


def other_loop(rank: int, layout: RankLayout, odd: int, arguments: dict[str, Any]) -> tuple[str, int]:
    """Begin a loop of ``prefetch`` with other arguments on one rank; return the error of this rank, and the steps
    of a loop with equal arguments after it."""
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)
    text = error_of(lambda: list(prefetch([IDS], collection, **(arguments if rank == odd else {}))))
    for ids in prefetch([IDS] * 3, collection):
        _step(collection, ids)
    return text, collection.steps


def other_settings(rank: int, layout: RankLayout, odd: int, ahead: bool) -> tuple[int, str]:
    """Train with another learning rate on one rank from step 2 on; return the steps done and the error of this rank."""
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)
    batches = [IDS] * 6

    def train() -> None:
        for number, ids in enumerate(prefetch(batches, collection) if ahead else batches):
            if number == 2 and rank == odd:
                collection.optimizer.param_groups[0]["lr"] *= 0.5
            _step(collection, ids)

    text = error_of(train)
    return collection.steps, text


def fails_in_a_step(rank: int, layout: RankLayout, odd: int, where: str, ahead: bool, exchange: str) -> tuple[str, int]:
    """Run out of memory on one rank at a point of step 2, which then stays alive; return the error and steps done."""
    pooled = where in ("sums", "spread", "pooling")
    make = EmbeddingBagCollection if pooled else EmbeddingCollection
    place = "requester" if where == "pooling" else "owner"
    table = EmbeddingBagTable("item", 50, 4, pooling_at=place) if pooled else EmbeddingTable("item", 50, 4)
    collection = make([table], layout=layout, exchange=exchange)

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    batches = [{"item": Jagged(torch.arange(50), torch.tensor([50]))} for _ in range(8)]

    def train() -> None:
        for number, ids in enumerate(prefetch(batches, collection) if ahead else batches):
            if number == 2 and rank == odd:
                job = getattr(pipeline_of(collection), "_job", None)
                router = job._router if where == "job" and job is not None else collection.engine.router
                if where == "dense part":
                    out_of_memory()
                owner, name = {
                    "tap": (collection, "after_lookup"), "pooling": (torch.nn.functional, "embedding_bag"),
                    "job": (router, "fetch"),
                }.get(where, (router, where))  # fmt: skip
                setattr(owner, name, out_of_memory)
            rows = collection(ids)["item"]
            (rows if isinstance(rows, torch.Tensor) else rows.values).sum().backward()
            collection.optimizer.step()

    def run() -> None:
        with collection if where == "dense part" else nullcontext():
            train()

    return error_of(run), collection.steps


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", ["dies", "hangs", "extra look-up"])
def test_a_broken_rank_is_an_error_on_every_other_rank(fault: str) -> None:
    with closing(RankPool(4)) as pool:
        results = pool.run(lose_a_rank, RankLayout(2, 2), 3, fault, 1.5)
    for rank, text in enumerate(results):
        if text is None:
            assert (rank, fault) == (3, "dies")
            continue
        if fault == "extra look-up" and text.startswith("EmbeddingError"):
            assert "ranks make different calls" in text, "reported by the next look-up of the others"
            continue
        assert text.startswith(f"CollectiveError: rank {rank}: all_to_all with ranks "), text
        assert "restart the job" in text


@pytest.mark.parametrize("fault", ["evaluates", "skips a step"])
@pytest.mark.parametrize(
    ("nodes", "local_ranks", "odd", "exchange"),
    [(2, 2, 3, "chain"), (2, 2, 0, "direct"), (2, 1, 1, "chain"), (1, 2, 0, "chain")],
)
def test_different_calls_are_refused_with_both_calls(
    ranks: Ranks, nodes: int, local_ranks: int, odd: int, exchange: str, fault: str
) -> None:
    """Every rank fails at once, also if the odd rank is on another node and rail, and training can continue."""
    layout = RankLayout(nodes, local_ranks)
    for text, continues in ranks(layout.world_size).run(diverge, layout, odd, fault, exchange, timeout=50):
        assert text.startswith("EmbeddingError: ranks make different calls: rank ")
        assert f"rank {odd} {'only looks' if fault == 'evaluates' else 'looks'} rows up" in text
        assert ("(4 modulo 8)" in text) == (fault == "skips a step")
        assert continues


@pytest.mark.parametrize("ahead", [False, True])
def test_another_learning_rate_on_one_rank_is_an_error_on_every_rank(ranks: Ranks, ahead: bool) -> None:
    """Found by the first look-up after the update that differed; with the prefetch pipeline by the one after that."""
    for rank, (steps, text) in enumerate(ranks(4).run(other_settings, RankLayout(2, 2), 3, ahead)):
        assert steps == 3 + ahead
        assert text.startswith("EmbeddingError: ranks updated their rows with different settings")
        assert f"rank {rank}: SGD(" in text
        assert f"lr={0.005 if rank == 3 else 0.01}" in text
        assert "last checkpoint" in text


@pytest.mark.parametrize(
    ("odd", "arguments", "shown"),
    [
        (3, {"one_thread": True}, "one_thread=True, passes_per_step=1"),
        (0, {"ahead": 2}, "one_thread=False, passes_per_step=1, ahead=2"),
        (2, {"passes_per_step": 2}, "one_thread=False, passes_per_step=2"),
    ],
)
def test_other_arguments_of_prefetch_on_one_rank_are_an_error_on_every_rank(
    ranks: Ranks, odd: int, arguments: dict[str, object], shown: str
) -> None:
    """Below the 60 s of the process group, and training continues."""
    results = ranks(4).run(other_loop, RankLayout(2, 2), odd, arguments, timeout=50)
    others = [rank for rank in range(4) if rank != odd] if odd == 0 else [odd]
    for rank, (text, steps) in enumerate(results):
        assert text.startswith(f"EmbeddingError: ranks {others} begin a loop of flexd.prefetch with other settings")
        assert f"rank {rank}: {shown if rank == odd else 'one_thread=False, passes_per_step=1'}" in text
        assert steps == 3


@pytest.mark.parametrize(
    ("odd", "where", "ahead", "exchange"),
    [
        (3, "fetch", False, "chain"),
        pytest.param(1, "tap", False, "chain", marks=pytest.mark.long),
        pytest.param(0, "pooling", False, "chain", marks=pytest.mark.long),
        pytest.param(2, "dense part", False, "chain", marks=pytest.mark.long),
        pytest.param(0, "fetch", False, "direct", marks=pytest.mark.long),
        pytest.param(1, "push", False, "chain", marks=pytest.mark.long),
        pytest.param(0, "reduce", True, "chain", marks=pytest.mark.long),
        (2, "job", True, "chain"),
        (1, "sums", False, "chain"),
        pytest.param(3, "spread", True, "direct", marks=pytest.mark.long),
    ],
)
def test_an_error_between_two_exchanges_is_named_on_every_rank(
    odd: int, where: str, ahead: bool, exchange: str
) -> None:
    """The rank that ran out of memory stays alive. The deadline is far below the 60 s of the process group."""
    with closing(RankPool(4)) as pool:
        results = pool.run(fails_in_a_step, RankLayout(2, 2), odd, where, ahead, exchange, timeout=40)
    for rank, (text, steps) in enumerate(results):
        assert steps == 2 or where == "job"
        assert "tried to allocate 20.00 GiB" in text
        if rank == odd:
            assert text.startswith("OutOfMemoryError")
        else:
            assert text.startswith(f"CollectiveError: rank {rank}: ")
            assert f"rank {odd}: OutOfMemoryError: tried to allocate" in text
            assert "restart the job" in text


def test_a_second_thread_in_a_step_is_refused() -> None:
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 10, 4)], layout=RankLayout(1, 1))
    ids = {"item": flexd.Jagged(torch.tensor([1, 2]), torch.tensor([2]))}
    with ThreadPoolExecutor(1, thread_name_prefix="evaluation") as elsewhere:
        rows = collection(ids)["item"].values
        with pytest.raises(EmbeddingError, match=r"thread 'evaluation.*' uses .* during a step of thread 'MainThread'"):
            elsewhere.submit(collection, ids).result(30)
        rows.sum().backward()
        collection.optimizer.step()
        elsewhere.submit(collection, ids).result(30)  # between steps another thread may go on
