"""Beginning, settling, listing, healing and ending of epochs with real connections."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.control.agent.inbox import Prepared
from flexd.control.daemon.migration import MigrationState
from flexd.control.daemon.pusher import MAX_TRIES, ChunkLimits
from flexd.control.protocol.messages import RowsAssembly
from flexd.core.errors import ControlError
from flexd.core.placement import Delta, RankLayout
from tests.support.ranks_in_threads import Ranks, committed, migrate, prepare_nothing, same_content, target
from tests.support.until import until

pytestmark = pytest.mark.slow


def test_a_new_attempt_starts_from_an_empty_placement(job: Callable[..., Any]) -> None:
    with job(chunks=ChunkLimits(1), timeout_seconds=1.5) as (hosted, ranks):
        running = migrate(hosted.coordinator, "p1", target(1), 5)
        until(lambda: running.record.chunks_applied > 3)
        ranks.stop()
        with Ranks(hosted.port, RankLayout(1, 2), attempt="a2") as restarted:
            until(lambda: hosted.coordinator.status().attempts_waiting == 1, what=restarted.state())
            until(lambda: hosted.ready() and hosted.coordinator.live().attempt == "a2", what=restarted.state())
            assert running.state is MigrationState.FAILED
            assert hosted.coordinator.live().generation == 2
            assert hosted.coordinator.live().layout == RankLayout(1, 2)
            assert len(hosted.coordinator.placement()) == 0
            assert hosted.journal.segment.attempt == "a2"
            migration = migrate(hosted.coordinator, "p2", target(1), 50, generation=2)
            assert migration.wait(20) is MigrationState.COMMITTED
            assert restarted.all_at(target(1))


def test_a_silent_rank_is_reported_as_lost(job: Callable[..., Any]) -> None:
    with job(RankLayout(2, 1), timeout_seconds=1.5) as (hosted, ranks):
        ranks.ranks[1].agent.stop(10)
        until(lambda: not hosted.ready())
        until(lambda: "1 of 2 ranks" in hosted.coordinator.live().reason)
        assert "rank_disconnected" in hosted.names()
        until(lambda: "rank_lost" in hosted.names())


def test_a_journal_is_continued_and_a_lost_one_replaced_by_listings_of_the_ranks(
    host: Callable[..., Any], job: Callable[..., Any], tmp_path: Path
) -> None:
    with job(RankLayout(2, 3)) as (hosted, ranks):
        committed(hosted.coordinator, ranks, "p1", target(1), 100)
        hosted.close()
        kept = host(port=hosted.port)
        until(kept.ready, what=ranks.state())
        assert "placement_listed" not in kept.names()
        assert kept.coordinator.live().generation == 1
        kept.close()
        again = host(tmp_path / "empty", port=hosted.port)
        until(again.ready, what=ranks.state())
        assert "placement_listed" in again.names()
        assert again.coordinator.placement().digest() == target(1).digest()
        assert again.coordinator.placement().version == 6
        committed(again.coordinator, ranks, "p2", target(2), 100)


def test_one_rank_restarted_in_the_same_attempt_receives_no_chunks(job: Callable[..., Any]) -> None:
    with job(RankLayout(2, 1), timeout_seconds=2.0) as (hosted, ranks):
        committed(hosted.coordinator, ranks, "p1", target(1, 50), 10)
        ranks.ranks[1].agent.stop(10)
        with Ranks(hosted.port, RankLayout(2, 1)) as fresh:
            fresh.ranks[0].agent.stop(10)
            until(lambda: "do not agree" in hosted.coordinator.status().reason, what=str(hosted.events))
            assert not hosted.ready()
            assert fresh.history == [[], []]


def mismatches(hosted: Any) -> int:
    return int(hosted.coordinator.status().digest_mismatches)


def test_a_wrong_record_of_the_daemon_is_replaced_by_what_the_ranks_list(job: Callable[..., Any]) -> None:
    with job(RankLayout(2, 2)) as (hosted, ranks):
        committed(hosted.coordinator, ranks, "p1", target(1), 200)
        running = migrate(hosted.coordinator, "p2", target(2), 5)
        until(lambda: running.record.chunks_applied > 2)
        pusher = hosted.coordinator.pusher
        for version in list(pusher.digests):
            pusher.digests[version] ^= 1
        until(lambda: mismatches(hosted) > 0)
        assert running.wait(20) is MigrationState.FAILED
        assert "reports another placement at version" in running.record.problem
        until(lambda: "placement_listed" in hosted.names() and hosted.ready(), what=lambda: hosted.events)
        committed(hosted.coordinator, ranks, "p3", target(3), 100)
        assert same_content(ranks.history)
        assert hosted.coordinator.placement().digest() == target(3).digest()
        assert mismatches(hosted) == 1
        assert (hosted.coordinator.divergence, hosted.coordinator.pusher.paused) == ("", False)


def test_pushing_pauses_after_a_repeat_until_an_operator_resumes(job: Callable[..., Any]) -> None:
    with job(RankLayout(2, 1)) as (hosted, ranks):
        ranks.false_digests[1] = 12345
        until(lambda: hosted.coordinator.divergence, what=lambda: hosted.events)
        assert hosted.coordinator.divergence == (
            "rank 1 reports another placement at version 0 than the daemon has recorded, again after the daemon has "
            "read the ranks' placement"
        )
        assert hosted.names().count("placement_listed") == 1
        until(hosted.ready)
        assert hosted.coordinator.pusher.paused
        epochs = hosted.coordinator.status().epochs
        waiting = migrate(hosted.coordinator, "p1", target(1, 50), 10)
        seen = mismatches(hosted)
        until(lambda: mismatches(hosted) > seen + 2)
        assert waiting.record.chunks_pushed == 0
        assert hosted.coordinator.status().epochs == epochs, "a paused channel keeps its epoch"
        hosted.coordinator.resume()
        until(lambda: hosted.names().count("pushing_paused") == 2, what=lambda: hosted.events)
        assert hosted.names().count("placement_listed") == 2
        ranks.false_digests.clear()
        hosted.coordinator.resume()
        committed(hosted.coordinator, ranks, "p2", target(2, 50), 10)


PAIR = RankLayout(2, 1)


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
    hosted, faults, calls = host(), [error], []

    def prepare(delta: Delta, after: Prepared | None) -> Prepared:
        calls.append(delta)
        for fault in faults:
            raise fault
        return prepare_nothing(delta, after)

    with Ranks(hosted.port, prepare_of_rank={2: prepare}) as ranks:
        until(hosted.ready, what=ranks.state())
        failed = migrate(hosted.coordinator, "p1", target(1), 100)
        assert failed.wait(20) is MigrationState.FAILED, (ranks.state(), hosted.events)
        assert f"rank 2 refused chunk 1: rank 2: chunk 1 cannot be prepared: {words}" in failed.record.problem
        assert len(failed.record.problem) < 1200
        assert "\n" not in failed.record.problem
        assert len(calls) == 1
        until(hosted.ready, what=ranks.state())
        assert [rank.agent.counters["connects"] for rank in ranks.ranks] == [1, 1, 1, 1]
        assert hosted.coordinator.status().refused_chunks == 1
        faults.clear()
        committed(hosted.coordinator, ranks, "p2", target(2), 100)
        assert same_content(ranks.history)


def test_chunks_that_never_arrive_fail_their_migration_after_bounded_tries(
    host: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = host()
    receive, broken, tries = RowsAssembly.rows, threading.Event(), [0]

    def fail(assembly: RowsAssembly) -> tuple[np.ndarray, np.ndarray]:
        keys, changed = receive(assembly)
        if broken.is_set() and threading.current_thread().name.endswith("-1"):
            tries[0] += 1
            raise ControlError("the connection is cut")
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
        committed(hosted.coordinator, ranks, "p2", target(1, 50), 10)
