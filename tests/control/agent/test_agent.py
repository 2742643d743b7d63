"""Agents of absent, unresponsive and forged daemons, and a daemon with invalid ranks."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flexd.control.agent.agent import Agent
from flexd.control.agent.inbox import ChunkInbox
from flexd.control.agent.rank_connection import RankConnection
from flexd.control.daemon.migration_states import MigrationState
from flexd.control.protocol.messages import EpochGo, Hello, Progress, encode
from flexd.core.homes import Homes
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks, identity, step_report, target
from tests.support.raw_rank import RawRank
from tests.support.until import until

PAIR = RankLayout(2, 1)
LARGER = KeySpace([replace(TABLES.tables[0], rows=60_000), *TABLES.tables[1:]])


def lone_agent(port: int, timeout_seconds: float = 1.0) -> Agent:
    inbox = ChunkInbox(Homes(TABLES, PAIR), 0, (10, 10))
    return Agent(inbox, identity(0, PAIR), f"127.0.0.1:{port}", SECRET, timeout_seconds)


def refused(hosted: Any, kind: str) -> int:
    return int(hosted.coordinator.status().refused_messages[kind])


def test_an_agent_without_a_daemon_neither_blocks_nor_grows() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        agent = lone_agent(free.getsockname()[1])
        agent.start()
        for step in range(2000):
            agent.report(step_report(step, Placement.empty()))
        until(lambda: agent.counters.get("errors", 0) >= 3)
        assert "no daemon at" in agent.state
        pending = agent._context.reports.drain()
        assert pending is not None
        assert pending.steps == 2000
        assert agent.stop(5)


def test_an_unresponsive_server_costs_a_deadline_and_no_threads_or_sockets() -> None:
    with socket.socket() as unresponsive:
        unresponsive.bind(("127.0.0.1", 0))
        unresponsive.listen(64)
        agent = lone_agent(unresponsive.getsockname()[1], timeout_seconds=0.05)
        agent.start()
        until(lambda: agent.counters.get("errors", 0) >= 3)
        assert "does not answer" in agent.state
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        until(lambda: agent.counters.get("errors", 0) >= 8)
        assert threading.active_count() <= threads
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 1, "at most the one of the attempt under way"
        assert agent.stop(5)


def test_an_unexpected_error_is_counted_logged_once_with_its_stack_and_backed_off_and_training_goes_on(
    host: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: RankConnection) -> bool:
        raise RuntimeError("not foreseen")

    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready, what=ranks.state())
        with monkeypatch.context() as patched:
            patched.setattr(RankConnection, "_advance", fails)
            until(lambda: all(rank.agent.counters.get("errors", 0) >= 4 for rank in ranks.ranks), what=ranks.state())
            before = ranks.steps
            until(lambda: ranks.steps > before)
            assert all("not foreseen" in rank.agent.state for rank in ranks.ranks)
        with_stack = [record for record in caplog.records if record.exc_info and "unexpected" in record.message]
        assert sorted(record.message.split(":")[0] for record in with_stack) == ["rank 0", "rank 1"]
        until(hosted.ready, what=ranks.state())


def test_an_unexpected_error_in_the_coordinator_ends_the_epoch_and_the_next_one_begins(
    host: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready, what=ranks.state())
        epochs = hosted.coordinator.status().epochs
        monkeypatch.setattr(hosted.coordinator._epochs, "tick", failing_once(hosted.coordinator._epochs.tick))
        until(lambda: hosted.coordinator.status().epochs > epochs and hosted.ready(), what=ranks.state())
        migration = hosted.coordinator.migrate("p", lambda now: now.delta_to(target(1)).chunks(500))
        assert migration.wait(20) is MigrationState.COMMITTED, (migration.progress, ranks.state())


def failing_once(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def call(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("not foreseen")
        return function(*arguments)

    return call


def test_a_rank_with_another_secret_is_never_accepted(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR, secret=b"wrong") as ranks:
        until(lambda: all("same secret file" in rank.agent.state for rank in ranks.ranks), what=ranks.state)
        assert all(rank.agent.counters["forged"] >= 1 for rank in ranks.ranks)
        until(lambda: hosted.coordinator.channel_counters().refused.get("wrong_secret", 0) >= 2)
        assert hosted.coordinator.live() is None
        assert ranks.steps > 0
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda own: replace(own, table_digest=LARGER.digest, tables=LARGER.tables),
            "the tables differ: item.rows: 60000 in the trainer, 50000 in the daemon's configuration",
        ),
        (lambda own: replace(own, table_digest="other"), "the tables differ: digest other here"),
        (lambda own: replace(own, replica_slots=(1,)), "dim-groups"),
    ],
)
def test_a_contradicting_rank_gets_the_reason_and_the_status_shows_it(
    host: Callable[..., Any], change: Any, reason: str
) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR, identities=change) as ranks:
        until(lambda: all(reason in rank.agent.state for rank in ranks.ranks), what=ranks.state())
        assert hosted.coordinator.live() is None
        until(lambda: len(hosted.coordinator.status().refused_ranks) == 2)
        status = hosted.coordinator.status()
        assert sorted((each.attempt, each.rank) for each in status.refused_ranks) == [("a1", 0), ("a1", 1)]
        assert all(reason in each.reason for each in status.refused_ranks)
        assert status.reason.startswith("no rank is registered; rank ")
        assert reason in status.reason
        assert status.reason.endswith(", and 1 more")
        assert refused(hosted, "identity") >= 2
    until(lambda: not hosted.coordinator._epochs._hosted.channels._peer_of)


def test_a_job_with_more_ranks_than_the_daemon_serves_is_refused_with_the_reason(host: Callable[..., Any]) -> None:
    """One connection at a time: each rank is refused by name, closes, and makes room for the next."""
    hosted = host(max_ranks=1)
    reason = "the job has 2 ranks, and the daemon serves 1 at most"
    with Ranks(hosted.port, PAIR) as ranks:
        until(lambda: len(hosted.coordinator.status().refused_ranks) == 2, what=ranks.state())
        until(lambda: all(reason in rank.agent.state for rank in ranks.ranks), what=ranks.state())
        assert all("control.max_ranks" in rank.agent.state for rank in ranks.ranks)
        assert reason in hosted.coordinator.status().reason
        assert hosted.coordinator.live() is None
        assert ranks.steps > 0


def test_a_rank_of_another_job_does_not_register(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR, identities=lambda own: replace(own, job="other")) as ranks:
        until(
            lambda: all("serves job 'job', not 'other'" in rank.agent.state for rank in ranks.ranks), what=ranks.state
        )
        assert hosted.coordinator.status().refused_ranks == ()


def test_malformed_misdirected_and_replayed_messages_change_nothing(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks, RawRank(hosted.port) as raw:
        until(hosted.ready)
        epoch = hosted.coordinator._epochs.epoch
        fence = epoch._fence
        instance = hosted.coordinator._instance
        known = epoch.topology.hellos[0]
        progress = Progress(**fence, rank=0, sequence=1, agreed_version=99, applied_version=99, report=None)
        newer = {"sequence": 2**40}
        for data in [b"", b"x" * 100, b"x" * 100_000, encode(EpochGo(**fence))]:
            raw.send(data)
        for message in [
            replace(known, instance=instance),
            replace(progress, **newer),
            replace(progress, epoch=fence["epoch"] + 1, **newer),
            replace(progress, attempt="other", **newer),
            replace(progress, generation=7, **newer),
            replace(progress, token="other", **newer),
            replace(progress, job="other", **newer),
            replace(known, instance="another daemon", **newer),
            replace(progress, rank=7, **newer),
        ]:
            raw.send(message)
        # Messages that a rank's own connection repeats.
        client = ranks.ranks[0].agent._context.client
        client.send(encode(progress))
        client.send(encode(known))
        until(lambda: refused(hosted, "stale") == 7, what=str(hosted.coordinator.status()))
        until(lambda: refused(hosted, "replayed") == 3, what=str(hosted.coordinator.status()))
        assert refused(hosted, "malformed") == 5
        assert (epoch._agreed, epoch._applied) == ([0, 0], [0, 0])
        assert hosted.coordinator.status().applied_version == 0
        assert hosted.coordinator.status().epochs == 1
        migration = hosted.coordinator.migrate("p1", lambda p: p.delta_to(target(1, 50)).chunks(10))
        assert migration.wait(15) is MigrationState.COMMITTED
        assert ranks.all_at(target(1, 50))


def test_one_connection_registers_one_rank(host: Callable[..., Any]) -> None:
    hosted = host()
    with RawRank(hosted.port) as raw:
        own = identity(0, PAIR)
        first = Hello(
            "job", raw.notice.instance, "a1", 0, 2, 2, 1, own.replica_slots, own.table_digest, "s", "n", 1, 0, 0
        )
        raw.send(first)
        until(lambda: hosted.coordinator.status().ranks_ready == 1)
        raw.send(replace(first, rank=1, session="s1", nonce="n1", sequence=2))
        until(lambda: refused(hosted, "stale") == 1)
        assert hosted.coordinator.status().ranks_ready == 1


def test_an_idle_rank_waits_for_messages_and_does_not_poll(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        ranks.moving.clear()
        rank = ranks.ranks[0].agent._context
        until(lambda: not rank.reports.waiting)
        calls: list[float] = []
        receive = rank.client.receive

        def counted(timeout_seconds: float) -> object:
            calls.append(timeout_seconds)
            return receive(timeout_seconds)

        rank.client.receive = counted
        sequence = rank.sequence
        until(lambda: rank.sequence >= sequence + 3, what="three heartbeats of the rank")
        # Each heartbeat of either side ends one wait; a rank that polled would have made 20 calls a second.
        assert len(calls) <= 15
        ranks.moving.set()


def test_stop_sends_the_last_report(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
    assert sum(report.steps for rank, report in hosted.reports if rank == 0) <= ranks.steps
    until(lambda: sum(report.steps for rank, report in hosted.reports if rank == 0) >= ranks.steps - 5)


def test_reports_arrive_while_chunks_are_pushed(host: Callable[..., Any]) -> None:
    hosted = host(window_chunks=1)
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        migration = hosted.coordinator.migrate("p1", lambda p: p.delta_to(target(1)).chunks(2))
        until(lambda: migration.progress.chunks_applied > 20)
        before = len(hosted.reports)
        until(lambda: len(hosted.reports) > before + 2 or migration.done)
        assert not migration.done
        migration.abort()
        assert ranks.steps > 0
