"""A fault of one rank is an error on all ranks that names it, within the process group's timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from tests.support import fault_jobs
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.slow

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("fault", ["dies", "hangs", "extra look-up"])
def test_a_broken_rank_is_an_error_on_every_other_rank(fault: str) -> None:
    pool = RankPool(4)
    try:
        results = pool.run(fault_jobs.lose_a_rank, RankLayout(2, 2), 3, fault, 3.0)
    finally:
        pool.close()
    for rank, result in enumerate(results):
        if rank == 3 and fault == "dies":
            assert result is None
            continue
        if result is None:
            assert fault == "extra look-up", "gloo ends a process that gets the rows of another collective"
            continue
        text, _ = result
        if fault == "extra look-up" and text.startswith("EmbeddingError"):
            assert "ranks make different calls" in text, "reported by the next look-up of the others"
            continue
        assert text.startswith(f"CollectiveError: rank {rank}: all_to_all with ranks "), text
        assert "(all_to_all)" in text
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
    for text, continues in ranks(layout.world_size).run(fault_jobs.diverge, layout, odd, fault, exchange, timeout=50):
        assert text.startswith("EmbeddingError: ranks make different calls: rank ")
        assert f"rank {odd} {'only looks' if fault == 'evaluates' else 'looks'} rows up" in text
        assert ("(4 modulo 8)" in text) == (fault == "skips a step")
        assert continues


@pytest.mark.parametrize("ahead", [False, True])
def test_another_learning_rate_on_one_rank_is_an_error_on_every_rank(ranks: Ranks, ahead: bool) -> None:
    """Found by the first look-up after the update that differed; with run-ahead by the one after that."""
    results = ranks(4).run(fault_jobs.other_settings, RankLayout(2, 2), 3, ahead)
    for rank, (steps, text) in enumerate(results):
        assert steps == 3 + ahead
        assert text.startswith("EmbeddingError: ranks updated their rows with different settings")
        assert f"rank {rank}: SGD(" in text
        assert f"lr={0.005 if rank == 3 else 0.01}" in text
        assert "last checkpoint" in text


@pytest.mark.parametrize(
    ("odd", "arguments", "shown"),
    [
        (3, {"one_thread": True}, "one_thread=True, timeout_seconds=300, passes_per_step=1"),
        (0, {"timeout_seconds": 7.0}, "one_thread=False, timeout_seconds=7, passes_per_step=1"),
        (2, {"passes_per_step": 2}, "one_thread=False, timeout_seconds=300, passes_per_step=2"),
    ],
)
def test_other_arguments_of_prefetch_on_one_rank_are_an_error_on_every_rank(
    ranks: Ranks, odd: int, arguments: dict[str, object], shown: str
) -> None:
    """Below the 60 s of the process group, and training continues."""
    results = ranks(4).run(fault_jobs.other_loop, RankLayout(2, 2), odd, arguments, timeout=50)
    others = [rank for rank in range(4) if rank != odd] if odd == 0 else [odd]
    for rank, (text, steps) in enumerate(results):
        assert text.startswith(f"EmbeddingError: ranks {others} begin a loop of flexd.prefetch with other settings")
        usual = "one_thread=False, timeout_seconds=300, passes_per_step=1"
        assert f"rank {rank}: {shown if rank == odd else usual}" in text
        assert steps == 3


@pytest.mark.parametrize(
    ("odd", "where", "ahead", "exchange"),
    [
        (3, "fetch", False, "chain"),
        pytest.param(1, "tap", False, "chain", marks=pytest.mark.long),
        pytest.param(2, "dense part", False, "chain", marks=pytest.mark.long),
        pytest.param(0, "_pooled", False, "chain", marks=pytest.mark.long),
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
    pool = RankPool(4)
    try:
        results = pool.run(fault_jobs.fails_in_a_step, RankLayout(2, 2), odd, where, ahead, exchange, timeout=40)
    finally:
        pool.close()
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
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            collection(ids)
            errors.append("")
        except EmbeddingError as error:
            errors.append(str(error))

    def run_elsewhere() -> str:
        thread = threading.Thread(target=elsewhere, name="evaluation")
        thread.start()
        thread.join(30)
        return errors.pop()

    rows = collection(ids)["item"].values
    text = run_elsewhere()
    assert "thread 'evaluation' uses the collection during a step of thread 'MainThread'" in text
    assert "from one thread" in text
    rows.sum().backward()
    collection.optimizer.step()
    assert run_elsewhere() == "", "between steps another thread may go on"
