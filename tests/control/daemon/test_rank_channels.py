"""Connections of ranks: who speaks for which registration, heartbeats, and messages that do not grow with the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from flexd.control.daemon.channel_events import Closed, Event
from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.daemon.epoch import Epoch
from flexd.control.daemon.membership import Topology
from flexd.control.daemon.rank_channels import RankChannels
from flexd.control.protocol.messages import DaemonNotice, EpochAnnouncement, Fence, Heartbeat, Hello, decode
from flexd.control.protocol.report import PlacementState, RankIdentity
from flexd.core.errors import StaleMessageError

RANKS = 3_431


class _Server:
    """Records what is sent and closed, and returns the events that a test puts in."""

    def __init__(self) -> None:
        self.sent: list[tuple[tuple[int, ...], bytes]] = []
        self.closed: list[tuple[int, str]] = []
        self.events: list[Event] = []

    def send(self, peers: Sequence[int], message: bytes, body: bytes = b"") -> None:
        self.sent.append((tuple(peers), message))

    def close(self, peer: int, reason: str) -> None:
        self.closed.append((peer, reason))

    def receive(self, limit: int, timeout_seconds: float) -> list[Event]:
        found, self.events = self.events[:limit], self.events[limit:]
        return found


def hello(rank: int, ranks: int = RANKS, nonce: str = "") -> Hello:
    identity = RankIdentity("job", "a", rank, ranks, 1, (1,), "digest")
    return Hello(identity, "i", f"s{rank}", nonce or f"{rank:016x}", PlacementState(0, 0))


def channels(timeout_seconds: float = 15.0) -> tuple[RankChannels, _Server]:
    server = _Server()
    return RankChannels(cast(ChannelServer, server), DaemonNotice("job", "i", "digest"), timeout_seconds), server


def test_no_message_of_an_epoch_grows_with_the_ranks() -> None:
    made, server = channels()
    hellos = tuple(map(hello, range(RANKS)))
    for peer, each in enumerate(hellos):
        made.register(peer, each)
    Epoch(made, Topology(hellos), Fence("job", "a", 1, 1, "token"), 15.0, 100)
    assert len(server.sent) == RANKS
    assert max(len(message) for _, message in server.sent) < 512
    for peers, message in server.sent:
        announcement = decode(message)
        assert isinstance(announcement, EpochAnnouncement)
        assert peers == (int(announcement.nonce, 16),), "each rank receives its own nonce"
    assert announcement.report_seconds == pytest.approx(RANKS / 2_500)


def test_a_connection_speaks_for_one_rank_and_a_registration_has_one_connection() -> None:
    made, server = channels()
    made.check_sender(3, hello(0))
    made.register(3, hello(0))
    made.check_sender(3, hello(0, nonce="again"))
    with pytest.raises(StaleMessageError, match="rank 1 on another rank's connection"):
        made.check_sender(3, hello(1))
    made.register(3, hello(0, nonce="again"))
    assert made.peers_of(Topology((hello(0), hello(1)))) == (3, -1)
    made.register(5, hello(0, nonce="anew"))
    assert server.closed == [(3, "replaced")]
    with pytest.raises(StaleMessageError, match="rank 0 on a connection that it has given up"):
        made.check_sender(3, hello(0))
    server.events = [Closed(3, "replaced")]
    assert made.receive(10, 0.0) == [], "its registration lives on another connection"
    assert made.peers_of(Topology((hello(0),))) == (5,)


@pytest.mark.parametrize(
    ("ranks", "timeout_seconds", "seconds"), [(2, 15.0, 1.0), (2, 2.0, 0.5), (RANKS, 15.0, RANKS / 1_000)]
)
def test_heartbeats_are_as_far_apart_as_ranks_and_timeout_allow(
    ranks: int, timeout_seconds: float, seconds: float
) -> None:
    made, server = channels(timeout_seconds)
    for rank in range(ranks):
        made.register(rank, hello(rank))
    for now in (100.0, 100.0 + 0.99 * seconds):
        made.send_heartbeats(now)
    assert [(peers, decode(message)) for peers, message in server.sent] == [(tuple(range(ranks)), Heartbeat())]
    made.send_heartbeats(100.0 + 1.01 * seconds)
    assert len(server.sent) == 2
