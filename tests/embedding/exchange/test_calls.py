"""The time of a step by phase, and the notices of a process that ends by an error."""

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flexd
from flexd.control.protocol.report import PhaseReport
from flexd.core.placement import RankLayout
from flexd.core.step_phases import StepPhase
from flexd.embedding.exchange import calls
from flexd.embedding.exchange.calls import PhaseMeter, ProcessEnd
from tests.support.forked import Forked
from tests.support.until import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calls.time, "perf_counter", clock)
    return clock


def taken(meter: PhaseMeter) -> tuple[dict[str, PhaseReport], float]:
    phases, cover = meter.drain()
    return {phase.phase: phase for phase in phases}, cover


def test_each_second_counts_once_in_the_innermost_phase(clock: Clock) -> None:
    meter = PhaseMeter()
    clock.now += 1
    with meter.phase(StepPhase.PUSH):
        clock.now += 2
        with meter.phase(StepPhase.SYNC):
            clock.now += 4
            meter.begin_collective()
            clock.now += 8
            meter.end_collective(leaves_node=True)
            meter.sent(5, 7)
        clock.now += 16
    clock.now += 32
    meter.begin_collective()
    found, cover = taken(meter)
    assert {name: phase.computed_seconds for name, phase in found.items() if phase.computed_seconds} == {
        "dense": 33, "push": 18, "sync": 4,
    }  # fmt: skip
    assert found["sync"] == PhaseReport(
        "sync", 4, exposed_seconds=8, inter_seconds=8, intra_bytes=5, inter_bytes=7, inter_collectives=1
    )
    assert cover == 0
    assert all(phase.computed_seconds == phase.exposed_seconds == 0 for phase in meter.drain()[0])


def test_collectives_beside_the_thread_are_exposed_as_far_as_it_waits(clock: Clock) -> None:
    meter = PhaseMeter()
    job = meter.beside = PhaseMeter(overlaps=True)
    meter.begin_job()
    clock.now += 6  # of both threads
    with job.phase(StepPhase.IDS):
        job.begin_collective()
        clock.now += 3
        job.end_collective(leaves_node=False)
    meter.begin_wait()
    with job.phase(StepPhase.ROWS):
        job.begin_collective()
        clock.now += 1
        job.end_collective(leaves_node=True)
    meter.end_wait()
    found, cover = taken(meter)
    assert found["dense"].computed_seconds == 9
    assert cover == 3, "nine seconds beside the job, of which it computed six itself"
    assert (found["ids"].overlapped_seconds, found["rows"].overlapped_seconds) == (3, 1)
    assert (found["ids"].exposed_seconds, found["rows"].exposed_seconds) == (0.75, 0.25)


SECONDS = 180.0
"""Less than half of the timeout of the process group."""
GROUP_SECONDS = 400.0
"""Timeout of the process group, far longer than the test waits."""
STAYS_SECONDS = 300.0


def stay_alive(done: Path) -> None:
    deadline = time.monotonic() + STAYS_SECONDS
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def train(rank: int, end: str) -> None:
    layout = RankLayout(1, 2)
    tables = [flexd.EmbeddingTable("item", 40, 4)]
    collection = flexd.EmbeddingCollection(tables, optimizer=flexd.SGD(0.1), layout=layout)
    for step in range(4):
        rows = collection({"item": flexd.Jagged(torch.tensor([1, 2]), torch.tensor([2]))})["item"].values
        if step == 2 and rank == 1:
            if end in ("error", "error of a thread"):
                raise ValueError("batch 7 is broken")
            if end == "exit in a step":
                sys.exit(3)
        rows.sum().backward()
        collection.optimizer.step()
        if step == 2 and rank == 1 and end == "exit between steps":
            sys.exit(3)


def run_rank(rank: int, port: int, end: str, done: Path) -> None:
    """Train until rank 1 ends in some way.

    The process of rank 1 stays alive after an error until the file ``done`` exists, as one with a busy thread does, so
    that rank 0 cannot learn of the end from a closed connection.
    """
    timeout = timedelta(seconds=GROUP_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    if rank == 1 and end.startswith("error"):
        threading.Thread(target=stay_alive, args=(done,)).start()
    if rank == 1 and end == "error of a thread":
        trainer = threading.Thread(target=train, args=(rank, end))
        trainer.start()
        trainer.join()
    else:
        train(rank, end)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("error", "rank 1: ValueError: batch 7 is broken"),
        ("error of a thread", "rank 1: ValueError: batch 7 is broken"),
        ("exit in a step", "rank 1: RuntimeError: the process ended during a step"),
        ("exit between steps", None),
    ],
)
def test_the_other_rank_is_told_why(tmp_path: Path, end: str, told: str | None) -> None:
    # As a launcher does, so that the store outlives the ranks.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = tmp_path / "done"
    ranks = [Forked(run_rank, rank, store.port, end, done, directory=tmp_path, name=str(rank)) for rank in range(2)]
    try:
        first = ranks[0].wait(SECONDS)
        done.touch()
        own = ranks[1].wait(SECONDS).stderr
    finally:
        for rank in ranks:
            rank.kill()
    said = first.stderr
    assert first.returncode == 1
    assert "CollectiveError: rank 0: all_to_all with ranks 1" in said
    if told is None:
        assert "the process ended" not in said, "what ends between steps may be the regular end of a trainer"
    else:
        assert f"with ranks 1: {told} - see the log of the rank named last" in said
    if end.startswith("error"):
        assert "ValueError: batch 7 is broken" in own, "the hook that was there before prints the error"


class Guard:
    """A ``StepGuard`` in a step, as far as ``ProcessEnd`` uses it."""

    step_thread: threading.Thread | None = None
    passes = (None,)

    def __init__(self, told: list[str], name: str, *, closed: bool = False) -> None:
        self.told, self.name, self.closed = told, name, closed

    def publish(self, error: BaseException) -> bool:
        self.told.append(f"{self.name}: {error}")
        return True


def test_collections_that_are_closed_or_gone_tell_nobody_and_others_tell_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    monkeypatch.setattr("atexit.register", lambda _: None)
    told: list[str] = []
    end, kept = ProcessEnd(), [Guard(told, "closed", closed=True), Guard(told, "alive")]
    for guard in kept:
        end.watch(guard)
    end.watch(Guard(told, "gone"))
    sys.excepthook(ValueError, ValueError("x"), None)
    end._at_exit()
    assert told == ["alive: x"]
