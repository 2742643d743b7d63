"""Garbled and misdirected messages: counted by kind, none of them acts, and none is a sign of life."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.daemon.epoch import Epoch
from flexd.control.daemon.membership import Membership, Topology
from flexd.control.daemon.message_receiver import REFUSED_KINDS, MessageReceiver
from flexd.control.daemon.rank_channels import RankChannels, Received
from flexd.control.protocol.messages import (
    ControlMessage,
    DaemonNotice,
    EpochEnd,
    EpochMessage,
    Fence,
    Hello,
    Listing,
    Progress,
    encode,
)
from flexd.control.protocol.report import PlacementState, RankIdentity
from flexd.core.errors import ControlError, StaleMessageError
from flexd.core.keyspace import KeySpace, TableSpec

TABLES = KeySpace([TableSpec("item", 100, 4)])
HELLOS = tuple(
    Hello(RankIdentity("job", "a", rank, 1, 2, (1,), TABLES.digest), "i", f"s{rank}", f"n{rank}", PlacementState(0, 0))
    for rank in (0, 1)
)
PEERS = (10, 11)
FENCE = Fence("job", "a", 3, 7, "token")
PROGRESS = Progress(FENCE, 0, 0)


class _NoServer:
    """Connections that carry nothing."""

    def send(self, *_: object) -> None: ...

    def close(self, *_: object) -> None: ...


class Channel:
    """An epoch of two ranks; what acts is recorded with its rank, or refused with the next of ``refusals``."""

    def __init__(self) -> None:
        notice = DaemonNotice("job", "i", TABLES.digest)
        channels = RankChannels(cast(ChannelServer, _NoServer()), notice, 1.0)
        self.members = Membership("job", TABLES, silent_seconds=1e9)
        for peer, hello in zip(PEERS, HELLOS, strict=True):
            channels.register(peer, hello)
            self.members.accept(hello, 0.0)
        self.epoch = Epoch(channels, Topology(HELLOS), FENCE, 1.0, 100)
        self.receiver = MessageReceiver(channels, "i", self.members, lambda *_, **__: None)
        self.acted: list[tuple[int, EpochMessage]] = []
        self.refusals: list[ControlError] = []

    def arrives(self, peer: int, message: ControlMessage | bytes, now: float = 1.0) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self.receiver.receive(Received(peer, data, b""), now, self.epoch, self._act)

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
    assert channel.receiver.refused == {kind: 1}
    assert kind in REFUSED_KINDS
    channel.arrives(11, PROGRESS)
    assert (channel.acted, channel.heard_at()) == ([(1, PROGRESS)], [0.0, 1.0])


def test_outside_of_an_epoch_its_messages_are_stale() -> None:
    channel = Channel()
    channel.receiver.receive(Received(10, encode(EpochEnd(FENCE)), b""), 1.0, None, channel._act)
    assert channel.receiver.refused == {"stale": 1}


def test_a_message_that_comes_too_early_acts_when_it_is_repeated_and_is_no_sign_of_life() -> None:
    channel = Channel()
    channel.refusals = [StaleMessageError("not requested"), ControlError("malformed")]
    listing = Listing(FENCE, version=0, rows=0)
    for now in (1.0, 2.0):
        channel.arrives(10, listing, now)
    assert channel.receiver.refused == {"stale": 1, "malformed": 1}
    assert channel.heard_at()[0] == 0.0
    channel.arrives(10, listing, 3.0)
    assert (channel.acted, channel.heard_at()[0]) == ([(0, listing)], 3.0)
