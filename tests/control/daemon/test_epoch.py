"""Connections of ranks: who speaks for which registration, heartbeats, and messages that do not grow with the ranks.

Garbled and misdirected messages are counted by kind, none of them acts, and none is a sign of life.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from flexd.control.daemon.channel_events import Closed, Event, Received
from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.daemon.epoch import REFUSED_KINDS, Epoch, RankChannels
from flexd.control.daemon.membership import Membership, Topology
from flexd.control.protocol.messages import (
    ControlMessage,
    DaemonNotice,
    EpochAnnouncement,
    EpochEnd,
    EpochMessage,
    Fence,
    Heartbeat,
    Hello,
    Listing,
    Progress,
    RankIdentity,
    decode,
    encode,
)
from flexd.control.protocol.report import PlacementState
from flexd.core.errors import ControlError, StaleMessageError
from flexd.core.keyspace import KeySpace, TableSpec

RANKS = 3_431
TABLES = KeySpace([TableSpec("item", 100, 4)])
HELLOS = tuple(
    Hello(RankIdentity("job", "a", rank, 1, 2, (1,), TABLES.digest), "i", f"s{rank}", f"n{rank}", PlacementState(0, 0))
    for rank in (0, 1)
)
PEERS = (10, 11)
FENCE = Fence("job", "a", 3, 7, "token")
PROGRESS = Progress(FENCE, 0, 0)


class _Server:
    """Records what is sent and closed, and returns the events that a test puts in."""

    def __init__(self) -> None:
        self.sent: list[tuple[tuple[int, ...], bytes]] = []
        self.closed: list[tuple[int, str]] = []
        self.events: list[Event] = []
        self.unread = SimpleNamespace(receive=lambda limit, timeout_seconds: self.events)

    def send(self, peers: Sequence[int], message: bytes, body: bytes = b"") -> None:
        self.sent.append((tuple(peers), message))

    def close(self, peer: int, reason: str) -> None:
        self.closed.append((peer, reason))


def hello(rank: int, ranks: int = RANKS, nonce: str = "") -> Hello:
    identity = RankIdentity("job", "a", rank, ranks, 1, (1,), "digest")
    return Hello(identity, "i", f"s{rank}", nonce or f"{rank:016x}", PlacementState(0, 0))


def channels(timeout_seconds: float = 15.0) -> tuple[RankChannels, _Server]:
    server = _Server()
    members = Membership("job", TABLES, silent_seconds=1e9)
    made = RankChannels(DaemonNotice("job", "i", TABLES.digest), timeout_seconds, members, lambda *_, **__: None)
    made.server = cast(ChannelServer, server)
    return made, server


def test_no_message_of_an_epoch_grows_with_the_ranks() -> None:
    made, server = channels()
    hellos = tuple(map(hello, range(RANKS)))
    for peer, each in enumerate(hellos):
        made._register(peer, each)
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
    made._check_sender(3, hello(0))
    made._register(3, hello(0))
    made._check_sender(3, hello(0, nonce="again"))
    with pytest.raises(StaleMessageError, match="rank 1 on another rank's connection"):
        made._check_sender(3, hello(1))
    made._register(3, hello(0, nonce="again"))
    assert made.peers_of(Topology((hello(0), hello(1)))) == (3, -1)
    made._register(5, hello(0, nonce="anew"))
    assert server.closed == [(3, "replaced")]
    with pytest.raises(StaleMessageError, match="rank 0 on a connection that it has given up"):
        made._check_sender(3, hello(0))
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
        made._register(rank, hello(rank))
    for now in (100.0, 100.0 + 0.99 * seconds):
        made.send_heartbeats(now)
    assert [(peers, decode(message)) for peers, message in server.sent] == [(tuple(range(ranks)), Heartbeat())]
    made.send_heartbeats(100.0 + 1.01 * seconds)
    assert len(server.sent) == 2


class Channel:
    """An epoch of two ranks; what acts is recorded with its rank, or refused with the next of ``refusals``."""

    def __init__(self) -> None:
        self.channels, _ = channels()
        self.members = self.channels._members
        for peer, hello in zip(PEERS, HELLOS, strict=True):
            self.channels._register(peer, hello)
            self.members.accept(hello, 0.0)
        self.epoch = Epoch(self.channels, Topology(HELLOS), FENCE, 1.0, 100)
        self.acted: list[tuple[int, EpochMessage]] = []
        self.refusals: list[ControlError] = []

    def arrives(self, peer: int, message: ControlMessage | bytes, now: float = 1.0) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self.channels.dispatch(Received(peer, data, b""), now, self.epoch, self._act)

    def _act(self, _: Epoch, rank: int, message: EpochMessage, __: object) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.acted.append((rank, message))

    def heard_at(self) -> list[float]:
        return [self.members._attempts["a"][rank].heard_at for rank in (0, 1)]


@pytest.mark.parametrize(
    ("peer", "message", "kind"),
    [
        *((10, replace(PROGRESS, fence=replace(FENCE, **change)), "stale") for change in (
            {"epoch": 6}, {"token": "other"}, {"job": "other"}, {"attempt": "b"}, {"generation": 2},
        )),
        (99, PROGRESS, "stale"), (11, HELLOS[0], "stale"), (9, HELLOS[0], "stale"),
        (10, replace(HELLOS[0], instance="another daemon"), "stale"),
        (10, encode(PROGRESS)[:-1], "malformed"), (10, b"", "malformed"),
        (10, DaemonNotice("job", "i", ""), "malformed"),
        (10, b'{"kind":"greeting"}', "unknown"),
        (12, replace(HELLOS[0], session="another", identity=replace(HELLOS[0].identity, rank=2)), "identity"),
    ],
)  # fmt: skip
def test_what_is_not_in_order_is_counted_and_does_not_act(peer: int, message: ControlMessage, kind: str) -> None:
    channel = Channel()
    channel.arrives(peer, message)
    assert (channel.acted, channel.heard_at()) == ([], [0.0, 0.0])
    assert channel.channels.refused == {kind: 1}
    assert kind in REFUSED_KINDS
    channel.arrives(11, PROGRESS)
    assert (channel.acted, channel.heard_at()) == ([(1, PROGRESS)], [0.0, 1.0])


def test_outside_of_an_epoch_its_messages_are_stale() -> None:
    channel = Channel()
    channel.channels.dispatch(Received(10, encode(EpochEnd(FENCE)), b""), 1.0, None, channel._act)
    assert channel.channels.refused == {"stale": 1}


def test_a_message_that_comes_too_early_acts_when_it_is_repeated_and_is_no_sign_of_life() -> None:
    channel = Channel()
    channel.refusals = [StaleMessageError("not requested"), ControlError("malformed")]
    listing = Listing(FENCE, version=0, rows=0)
    for now in (1.0, 2.0):
        channel.arrives(10, listing, now)
    assert channel.channels.refused == {"stale": 1, "malformed": 1}
    assert channel.heard_at()[0] == 0.0
    channel.arrives(10, listing, 3.0)
    assert (channel.acted, channel.heard_at()[0]) == ([(0, listing)], 3.0)
