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
from flexd.control.daemon.migration import MigrationState
from flexd.core.keyspace import Homes, KeySpace
from flexd.core.placement import Placement, RankLayout
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks, identity, migrate, no_rows, step_report, target
from tests.support.until import until

PAIR = RankLayout(2, 1)
LARGER = KeySpace([replace(TABLES.tables[0], rows=60_000), *TABLES.tables[1:]])


def lone_agent(port: int, timeout_seconds: float = 1.0) -> Agent:
    inbox = ChunkInbox(Homes(TABLES, PAIR), 0, (10, 10))
    return Agent(inbox, identity(0, PAIR), f"127.0.0.1:{port}", no_rows, SECRET, timeout_seconds)


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
        until(lambda: "no daemon at" in agent.state)
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


def test_an_unexpected_error_in_the_coordinator_ends_the_epoch_and_the_next_one_begins(
    host: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready, what=ranks.state())
        epochs = hosted.coordinator.status().epochs
        monkeypatch.setattr(hosted.coordinator._epochs, "tick", failing_once(hosted.coordinator._epochs.tick))
        until(lambda: hosted.coordinator.status().epochs > epochs and hosted.ready(), what=ranks.state())
        migration = migrate(hosted.coordinator, "p", target(1), 500)
        assert migration.wait(20) is MigrationState.COMMITTED, (migration.record, ranks.state())


def failing_once(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def call(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("not foreseen")
        return function(*arguments)

    return call


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda own: replace(own, table_digest=LARGER.digest),
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
    with Ranks(hosted.port, PAIR, identities=change, tables=LARGER) as ranks:
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
    until(lambda: not hosted.coordinator._epochs._hosted._peer_of)
