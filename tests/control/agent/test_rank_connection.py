"""Misdirected, malformed and tampered messages of a daemon: a rank acts on none and continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flexd.control.agent.rank_connection import RankConnection
from flexd.control.daemon.migration import MigrationState
from flexd.control.protocol import messages
from flexd.control.protocol.messages import EpochAnnouncement, EpochEnd, Fence, RowsPiece, TapState, encode
from flexd.control.protocol.network import reconnect_backoff
from flexd.core.errors import StaleMessageError
from tests.control.agent.test_agent import PAIR, lone_agent
from tests.support.ranks_in_threads import Ranks, migrate, same_content, target
from tests.support.until import until

OF_ANOTHER: tuple[dict[str, Any], ...] = (
    {"epoch": 99}, {"token": "other"}, {"attempt": "other"}, {"generation": 9}, {"job": "other"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change"),
    [("rows of no chunk", {}), ("tap state", {}), *(("end", change) for change in OF_ANOTHER)],
    ids=str,
)
def test_a_misdirected_message_of_the_daemon_ends_the_connection_and_nothing_else(
    host: Callable[..., Any], kind: str, change: dict[str, Any]
) -> None:
    """A message of another epoch, or one that does not follow, is never acted on: the rank registers again."""
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        epoch = hosted.coordinator._epochs.epoch
        fence = replace(epoch.fence, **change)
        message = {
            "rows of no chunk": RowsPiece(fence),
            "end": EpochEnd(fence),
            "tap state": TapState(fence, 0, 0, 0),
        }[kind]
        before = ranks.ranks[1].agent.counters["connects"]
        hosted.coordinator._server.send([epoch.peers[1]], encode(message))
        until(lambda: ranks.ranks[1].agent.counters["connects"] > before, what=ranks.state())
        until(lambda: hosted.coordinator.status().epochs > 1 and hosted.ready(), what=ranks.state())
        migration = migrate(hosted.coordinator, "p1", target(1, 50), 10)
        assert migration.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)
        assert same_content(ranks.history)


def test_messages_that_cannot_be_read_end_the_connection_and_unknown_kinds_do_not(host: Callable[..., Any]) -> None:
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        peers = hosted.coordinator._epochs.epoch.peers
        hosted.coordinator._server.send(peers, b'{"kind":"greeting","job":"job"}')
        until(lambda: all(rank.agent.counters.get("unknown_messages") == 1 for rank in ranks.ranks), what=ranks.state())
        assert hosted.coordinator.status().epochs == 1
        hosted.coordinator._server.send(peers, b"rubbish")
        until(lambda: hosted.coordinator.status().epochs > 1 and hosted.ready(), what=ranks.state())
        migration = migrate(hosted.coordinator, "p1", target(1, 50), 10)
        assert migration.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)


def test_an_epoch_that_ends_on_one_rank_only_excludes_no_rank(host: Callable[..., Any]) -> None:
    """A rank that leaves an epoch which the daemon continues registers again as soon as it receives more of it."""
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        until(hosted.ready)
        epoch = hosted.coordinator._epochs.epoch
        hosted.coordinator._server.send(epoch.peers[1:], encode(EpochEnd(epoch.fence)))
        migration = migrate(hosted.coordinator, "p1", target(1, 50), 10)
        until(lambda: hosted.coordinator.status().epochs > 1 and hosted.ready(), what=ranks.state())
        assert migration.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)
        assert same_content(ranks.history)


def test_a_chunk_of_several_pieces_arrives(host: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(messages, "PIECE_BYTES", 64)
    hosted = host()
    with Ranks(hosted.port, PAIR) as ranks:
        migration = migrate(hosted.coordinator, "p1", target(1), 100)
        assert migration.wait(20) is MigrationState.COMMITTED, (ranks.state(), hosted.events)
        assert ranks.all_at(target(1))
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
    connection = RankConnection(lone_agent(1)._context, reconnect_backoff())
    connection._instance, connection._nonce, connection._last_epoch = "instance", "nonce", 4
    fence = replace(Fence("job", "a1", 1, 5, "token"), **change)
    with pytest.raises(StaleMessageError):
        connection._begin_epoch(EpochAnnouncement(fence, nonce))
