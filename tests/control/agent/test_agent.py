"""Agents of absent, unresponsive and forged daemons, and misdirected messages: a rank acts on none and goes on."""

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
from flexd.control.daemon.migration import MigrationState
from flexd.control.protocol import messages
from flexd.control.protocol.handshake import reconnect_backoff
from flexd.control.protocol.messages import EpochAnnouncement, EpochEnd, Fence, RowsPiece, TapState, encode
from flexd.core import supervision
from flexd.core.errors import StaleMessageError
from flexd.core.keyspace import Homes, KeySpace
from flexd.core.placement import Placement, RankLayout
from tests.support.ranks_in_threads import (
    SECRET,
    TABLES,
    Ranks,
    committed,
    identity,
    migrate,
    no_rows,
    prepare_nothing,
    same_content,
    step_report,
    target,
)
from tests.support.until import until

PAIR = RankLayout(2, 1)
LARGER = KeySpace([replace(TABLES.tables[0], rows=60_000), *TABLES.tables[1:]])


def lone_agent(port: int, timeout_seconds: float = 1.0) -> Agent:
    inbox = ChunkInbox(Homes(TABLES, PAIR), 0, (10, 10), lambda keys, tiers: keys >= 0, prepare_nothing)
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
        assert agent.reports.drain().steps == 2000
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
    job: Callable[..., Any],
) -> None:
    with job(PAIR) as (hosted, ranks):
        epochs = hosted.coordinator.status().epochs
        supervision.arm({supervision.VARIABLE: "thread.coordinator:1:raise"})
        until(lambda: hosted.coordinator.status().epochs > epochs and hosted.ready(), what=ranks.state())
        supervision.arm({})
        committed(hosted.coordinator, ranks, "p", target(1), 500)


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
        # The reason is that of the newest tick.
        until(lambda: hosted.coordinator.status().reason.endswith(", and 1 more"))
        status = hosted.coordinator.status()
        assert sorted((each.attempt, each.rank) for each in status.refused_ranks) == [("a1", 0), ("a1", 1)]
        assert all(reason in each.reason for each in status.refused_ranks)
        assert status.reason.startswith("no rank is registered; rank ")
        assert reason in status.reason
        assert refused(hosted, "identity") >= 2
    until(lambda: not hosted.coordinator.channels._peer_of)


OF_ANOTHER: tuple[dict[str, Any], ...] = (
    {"epoch": 99}, {"token": "other"}, {"attempt": "other"}, {"generation": 9}, {"job": "other"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change"),
    [("rows of no chunk", {}), ("tap state", {}), ("end", {}), *(("end", change) for change in OF_ANOTHER)],
    ids=str,
)
def test_a_misdirected_message_of_the_daemon_ends_the_connection_and_nothing_else(
    job: Callable[..., Any], kind: str, change: dict[str, Any]
) -> None:
    """A message of another epoch, or one that does not follow, is never acted on: the rank registers again. So does a
    rank that has left an epoch which the daemon continues, as soon as it receives more of it."""
    with job(PAIR) as (hosted, ranks):
        epoch = hosted.coordinator.epoch
        fence = replace(epoch.fence, **change)
        message = {
            "rows of no chunk": RowsPiece(fence),
            "end": EpochEnd(fence),
            "tap state": TapState(fence, 0, 0, 0),
        }[kind]
        before = ranks.ranks[1].agent.counters["connects"]
        hosted.coordinator._server.send([epoch.peers[1]], encode(message))
        migration = migrate(hosted.coordinator, "p1", target(1, 50), 10)
        until(lambda: ranks.ranks[1].agent.counters["connects"] > before, what=ranks.state())
        until(lambda: hosted.coordinator.status().epochs > 1 and hosted.ready(), what=ranks.state())
        assert migration.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)
        assert same_content(ranks.history)


def test_messages_that_cannot_be_read_end_the_connection_and_unknown_kinds_do_not(job: Callable[..., Any]) -> None:
    with job(PAIR) as (hosted, ranks):
        peers = hosted.coordinator.epoch.peers
        hosted.coordinator._server.send(peers, b'{"kind":"greeting","job":"job"}')
        until(lambda: all(rank.agent.counters.get("unknown_messages") == 1 for rank in ranks.ranks), what=ranks.state())
        assert hosted.coordinator.status().epochs == 1
        hosted.coordinator._server.send(peers, b"rubbish")
        until(lambda: hosted.coordinator.status().epochs > 1 and hosted.ready(), what=ranks.state())
        committed(hosted.coordinator, ranks, "p1", target(1, 50), 10)


def test_a_chunk_of_several_pieces_arrives(job: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(messages, "PIECE_BYTES", 64)
    with job(PAIR) as (hosted, ranks):
        committed(hosted.coordinator, ranks, "p1", target(1), 100)
        assert same_content(ranks.history)
        assert hosted.coordinator.status().epochs == 1


@pytest.mark.parametrize(
    ("change", "nonce"),
    [
        ({}, "an older nonce"),
        ({}, ""),
        ({"job": "other"}, "nonce"),
        ({"attempt": "a0"}, "nonce"),
        ({"epoch": 4}, "nonce"),
    ],
)
def test_an_epoch_is_joined_only_by_the_registrations_it_names(change: dict[str, Any], nonce: str) -> None:
    """A recorded announcement, correctly signed, must not move a rank."""
    connection = RankConnection(lone_agent(1), reconnect_backoff())
    connection._instance, connection._nonce, connection._last_epoch = "instance", "nonce", 4
    fence = replace(Fence("job", "a1", 1, 5, "token"), **change)
    with pytest.raises(StaleMessageError):
        connection._begin_epoch(EpochAnnouncement(fence, nonce))
