"""Duplicated, reordered, replayed, garbled and misdirected messages: counted by kind, and each acts at most once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.daemon.epoch import Epoch, RankMessage
from flexd.control.daemon.membership import Membership, RankPresence, Topology
from flexd.control.daemon.message_receiver import REFUSED_KINDS, MessageReceiver
from flexd.control.daemon.rank_channels import RankChannels, Received
from flexd.control.protocol.messages import DaemonNotice, Hello, Listing, Message, Progress, decode, encode
from flexd.core.errors import ControlError, StaleMessageError
from flexd.core.keyspace import KeySpace, TableSpec

TABLES = KeySpace([TableSpec("item", 100, 4)])
HELLOS = tuple(
    Hello("job", "i", "a", rank, 2, 1, 2, (1,), TABLES.digest, f"s{rank}", f"n{rank}", 1, 0, 0) for rank in (0, 1)
)
PEERS = (10, 11)
FAULTS = ("deliver", "duplicate", "delay", "replay", "garble", "other_peer", "old_epoch", "old_token")
CHANGES: dict[str, dict[str, object]] = {"old_epoch": {"epoch": 6}, "old_token": {"token": "other"}}


class _NoServer:
    """Connections that carry nothing."""

    def send(self, *_: object) -> None: ...


def opened() -> tuple[MessageReceiver, Epoch, Membership]:
    members = Membership("job", TABLES, silent_seconds=1e9)
    epoch = Epoch(connected(), Topology(HELLOS), "job", "i", 3, 7, 1.0, 100)
    return MessageReceiver("job", "i", members, lambda *_, **__: None), epoch, members


def connected() -> RankChannels:
    channels = RankChannels(cast(ChannelServer, _NoServer()), DaemonNotice("job", "i", TABLES.digest), 1.0)
    for peer, hello in zip(PEERS, HELLOS, strict=True):
        channels.register(peer, hello)
    return channels


def arrives(receiver: MessageReceiver, epoch: Epoch | None, rank: int, message: Message | bytes) -> list[Message]:
    """Let a message arrive on the connection of a rank; return those that acted."""
    acted: list[Message] = []
    data = message if isinstance(message, bytes) else encode(message)
    peer = PEERS[rank] if rank in (0, 1) else 99
    receiver.receive(Received(peer, data, b""), 0.0, connected(), epoch, lambda _, message, __: acted.append(message))
    return acted


@given(st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 1), st.integers(0, 2**16)), max_size=40))
@settings(max_examples=150, deadline=None)
def test_on_any_channel_each_message_acts_at_most_once_and_in_order(steps: list[tuple[str, int, int]]) -> None:
    receiver, epoch, members = opened()
    acted: list[Progress] = []
    received: list[tuple[int, bytes]] = []
    late: list[tuple[int, bytes]] = []
    newest, sequence = [0, 0], [0, 0]
    expected: Counter[str] = Counter()

    def arrive(rank: int, data: bytes) -> None:
        acted.extend(cast(list[Progress], arrives(receiver, epoch, rank, data)))

    def sent(rank: int, **change: object) -> tuple[int, bytes]:
        sequence[rank] += 1
        fence = {**epoch.fence, **change}
        now = {"rank": rank, "sequence": sequence[rank], "agreed_version": 0, "applied_version": 0, "report": None}
        return sequence[rank], encode(Progress(**fence, **now))

    for fault, rank, salt in steps:
        number, data = sent(rank, **CHANGES.get(fault, {}))
        if fault in ("deliver", "duplicate"):
            arrive(rank, data)
            received.append((rank, data))
            newest[rank] = number
            if fault == "duplicate":
                arrive(rank, data)
                expected["replayed"] += 1
        elif fault == "delay":
            late.append((rank, data))
        elif fault == "replay" and received:
            arrive(*received[salt % len(received)])
            expected["replayed"] += 1
        elif fault == "garble":
            arrive(rank, data[: salt % len(data)])
            expected["malformed"] += 1
        elif fault == "other_peer":
            arrive(1 - rank, data)
            arrive(2, data)
            arrive(1 - rank, encode(replace(HELLOS[rank], sequence=2**40)))
            expected["stale"] += 3
        elif fault.startswith("old"):
            arrive(rank, data)
            expected["stale"] += 1
    for rank, data in late:
        number = cast(Progress, decode(data)).sequence
        arrive(rank, data)
        expected["replayed"] += number <= newest[rank]
        newest[rank] = max(newest[rank], number)
    for rank in (0, 1):
        numbers = [message.sequence for message in acted if message.rank == rank]
        assert numbers == sorted(set(numbers))
    assert Counter({kind: count for kind, count in receiver.refused.items() if count}) == +expected
    assert set(receiver.refused) <= set(REFUSED_KINDS)
    assert members.present() == RankPresence()


def test_unknown_ranks_and_other_jobs_are_refused_by_kind() -> None:
    receiver, epoch, _ = opened()
    now = {"agreed_version": 0, "applied_version": 0, "report": None}
    sent = [Progress(**epoch.fence, rank=rank, sequence=1, **now) for rank in (-1, 2)]
    for message in (*sent, replace(HELLOS[0], job="other")):
        assert arrives(receiver, epoch, 0, message) == []
    assert receiver.refused == {"malformed": 2, "stale": 1}


def test_a_message_that_is_refused_uses_up_no_sequence_number() -> None:
    """A rank's listing or offer that comes too early is acted on when it is repeated, and is no sign of life."""
    receiver, epoch, members = opened()
    members.accept(HELLOS[0], 0.0)
    acted: list[RankMessage] = []
    refusals = [StaleMessageError("not requested"), ControlError("malformed")]

    def act(_: Epoch, message: RankMessage, __: object) -> None:
        if refusals:
            raise refusals.pop(0)
        acted.append(message)

    listing = Listing(**epoch.fence, rank=0, sequence=5, version=0, rows=0, sha256="", error="")
    received = Received(PEERS[0], encode(listing), b"")
    for now in (1.0, 2.0):
        receiver.receive(received, now, connected(), epoch, act)
    assert receiver.refused == {"stale": 1, "malformed": 1}
    assert members._attempts["a"][0].heard_at == 0.0
    receiver.receive(received, 3.0, connected(), epoch, act)
    assert acted == [listing]
    assert members._attempts["a"][0].heard_at == 3.0
    receiver.receive(received, 4.0, connected(), epoch, act)
    assert receiver.refused["replayed"] == 1
