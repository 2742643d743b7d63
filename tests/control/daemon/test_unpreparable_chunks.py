"""Chunks that a rank cannot prepare or receive: refused by name, given up after bounded tries, blamed on that rank."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from flexd.control.agent.inbox import Prepared
from flexd.control.daemon.migration import MigrationState
from flexd.control.daemon.pusher import MAX_TRIES
from flexd.control.protocol.messages import RowsAssembly
from flexd.core.errors import ControlError
from flexd.core.placement import Delta, RankLayout
from tests.support.ranks_in_threads import Ranks, migrate, same_content, target
from tests.support.until import until

pytestmark = pytest.mark.slow

PAIR = RankLayout(2, 1)


@dataclass(frozen=True)
class Made:
    """A prepared chunk of any content."""

    nbytes: int = 1


class Faulty:
    """Prepares chunks, or raises ``error`` while there is one."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.calls = 0

    def __call__(self, delta: Delta, after: Prepared | None) -> Made:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return Made()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nstack"), "RuntimeError: CUDA out of memory."),
        (MemoryError(), "MemoryError"),
        (KeyError("a bug " + "x" * 5000), "KeyError: 'a bug "),
    ],
)
def test_a_chunk_that_a_rank_cannot_prepare_is_refused_by_name(
    host: Callable[..., Any], error: Exception, words: str
) -> None:
    hosted = host()
    prepare = Faulty(error)
    with Ranks(hosted.port, prepare_of_rank={2: prepare}) as ranks:
        until(hosted.ready, what=ranks.state())
        failed = migrate(hosted.coordinator, "p1", target(1), 100)
        assert failed.wait(20) is MigrationState.FAILED, (ranks.state(), hosted.events)
        assert f"rank 2 refused chunk 1: rank 2: chunk 1 cannot be prepared: {words}" in failed.record.problem
        assert len(failed.record.problem) < 1200
        assert "\n" not in failed.record.problem
        assert prepare.calls == 1
        until(hosted.ready, what=ranks.state())
        assert [rank.agent.counters["connects"] for rank in ranks.ranks] == [1, 1, 1, 1]
        assert hosted.coordinator.status().refused_chunks == 1
        prepare.error = None
        good = migrate(hosted.coordinator, "p2", target(2), 100)
        assert good.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)
        assert ranks.all_at(target(2))
        assert same_content(ranks.history)


def test_chunks_that_never_arrive_fail_their_migration_after_bounded_tries(
    host: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = host()
    error = ControlError("the connection is cut")
    receive, broken, tries = RowsAssembly.rows, threading.Event(), [0]

    def fail(assembly: RowsAssembly) -> tuple[np.ndarray, np.ndarray]:
        keys, changed = receive(assembly)
        if broken.is_set() and threading.current_thread().name.endswith("-1"):
            tries[0] += 1
            raise error
        return keys, changed

    monkeypatch.setattr(RowsAssembly, "rows", fail)
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        broken.set()
        failed = migrate(hosted.coordinator, "p1", target(1, 50), 10)
        assert failed.wait(60) is MigrationState.FAILED, (ranks.state(), hosted.events)
        assert tries[0] == MAX_TRIES
        assert f"chunk 1 was pushed {MAX_TRIES} times and not all ranks have agreed on it" in failed.record.problem
        assert re.search("rank 1 (left|registered again)", failed.record.problem), failed.record.problem
        broken.clear()
        good = migrate(hosted.coordinator, "p2", target(1, 50), 10)
        assert good.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)
        assert ranks.all_at(target(1, 50))
