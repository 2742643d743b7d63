"""Duplicated, reordered, replayed and tampered messages: counted by kind, and each acts at most once."""

from __future__ import annotations

import hmac
import json
from collections import Counter
from dataclasses import replace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.daemon.control_store import ControlStore
from flexd.control.daemon.epoch import Epoch, RankMessage
from flexd.control.daemon.membership import Membership, RankPresence, Topology
from flexd.control.daemon.message_receiver import REFUSED_KINDS, MessageReceiver
from flexd.control.protocol.messages import Hello, Listing, Progress, Signer
from flexd.core.errors import ControlError, StaleMessageError
from flexd.core.keyspace import KeySpace, TableSpec

KEY = b"a secret for the tests"
TABLES = KeySpace([TableSpec("item", 100, 4)])
HELLOS = tuple(
    Hello("job", "i", "a", rank, 2, 1, 2, (1,), TABLES.digest, f"s{rank}", f"n{rank}", 1, 0, 0, "::1", True, (), 1)
    for rank in (0, 1)
)
FAULTS = ("deliver", "duplicate", "delay", "replay", "tamper", "forge", "old_epoch", "old_token")
CHANGES: dict[str, dict[str, object]] = {"old_epoch": {"epoch": 6}, "old_token": {"token": "other"}}


class _Announced:
    """A store for an epoch in which no rank has settled."""

    def announce(self, _: object) -> None: ...


def opened() -> tuple[MessageReceiver, Epoch, Membership]:
    members = Membership("job", TABLES, silent_seconds=1e9)
    store = cast(ControlStore, _Announced())
    epoch = Epoch(store, Topology(HELLOS), "job", "i", 3, 7, 1.0, 100)
    return MessageReceiver("job", "i", Signer(KEY), members, lambda *_, **__: None), epoch, members


@given(st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 1), st.integers(0, 2**16)), max_size=40))
@settings(max_examples=150, deadline=None)
def test_on_any_channel_each_message_acts_at_most_once_and_in_order(steps: list[tuple[str, int, int]]) -> None:
    receiver, epoch, members = opened()
    acted: list[Progress] = []
    received: list[bytes] = []
    late: list[tuple[int, bytes]] = []
    newest, sequence = [0, 0], [0, 0]
    expected: Counter[str] = Counter()

    def arrive(data: bytes) -> None:
        receiver.receive(data, 0.0, cast(Any, None), epoch, lambda _, message: acted.append(cast(Progress, message)))

    def sent(rank: int, **change: object) -> tuple[int, bytes]:
        sequence[rank] += 1
        fence = {**epoch.fence, **change}
        now = {"rank": rank, "sequence": sequence[rank], "agreed_version": 0, "applied_version": 0, "report": None}
        return sequence[rank], Signer(KEY).seal(Progress(**fence, **now)).encode()

    for fault, rank, salt in steps:
        number, data = sent(rank, **CHANGES.get(fault, {}))
        if fault in ("deliver", "duplicate"):
            arrive(data)
            received.append(data)
            newest[rank] = number
            if fault == "duplicate":
                arrive(data)
                expected["replayed"] += 1
        elif fault == "delay":
            late.append((rank, data))
        elif fault == "replay" and received:
            arrive(received[salt % len(received)])
            expected["replayed"] += 1
        elif fault == "tamper":
            at = salt % len(data)
            arrive(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            expected["forged"] += 1
        elif fault == "forge":
            arrive(Signer(b"another secret of it").seal(replace(HELLOS[rank], sequence=2**40)).encode())
            expected["forged"] += 1
        elif fault.startswith("old"):
            arrive(data)
            expected["stale"] += 1
    for rank, data in late:
        number = cast(Progress, Signer(KEY).open(data)).sequence
        arrive(data)
        expected["replayed"] += number <= newest[rank]
        newest[rank] = max(newest[rank], number)
    for rank in (0, 1):
        numbers = [message.sequence for message in acted if message.rank == rank]
        assert numbers == sorted(set(numbers))
    assert Counter({kind: count for kind, count in receiver.refused.items() if count}) == +expected
    assert set(receiver.refused) <= set(REFUSED_KINDS)
    assert members.present() == RankPresence()


def test_a_hello_is_accepted_once() -> None:
    receiver, _, members = opened()
    data = Signer(KEY).seal(HELLOS[0]).encode()
    for _ in range(3):
        receiver.receive(data, 0.0, cast(Any, None), None, lambda *_: None)
    assert dict(receiver.refused) == {"replayed": 2}
    members.expire(2e9)
    receiver.receive(data, 2e9, cast(Any, None), None, lambda *_: None)
    assert dict(receiver.refused) == {"replayed": 3}
    assert members.present() == RankPresence()


def test_a_message_of_an_unknown_kind_is_counted_and_changes_nothing() -> None:
    receiver, epoch, members = opened()
    body = json.dumps({"kind": "greeting", "job": "job", **epoch.fence, "rank": 0, "sequence": 2**40})
    unknown = f"{hmac.new(KEY, body.encode(), 'sha256').hexdigest()}\n{body}".encode()
    fields = {"rank": 0, "sequence": 1, "agreed_version": 0, "applied_version": 0}
    acted: list[object] = []
    for data in (unknown, Signer(KEY).seal(Progress(**epoch.fence, **fields)).encode()):
        receiver.receive(data, 0.0, cast(Any, None), epoch, lambda _, message: acted.append(message))
    assert dict(receiver.refused) == {"unknown": 1}
    assert len(acted) == 1
    assert members.present() == RankPresence()


def test_every_epoch_has_a_unique_token() -> None:
    """Messages of an earlier daemon's epoch, with equal numbers, are of another epoch."""
    tokens = {opened()[1].fence["token"] for _ in range(8)}
    assert len(tokens) == 8
    assert all(len(token) >= 16 for token in tokens)


def test_unknown_ranks_and_other_jobs_are_refused_by_kind() -> None:
    receiver, epoch, _ = opened()
    now = {"agreed_version": 0, "applied_version": 0, "report": None}
    sent = [Progress(**epoch.fence, rank=rank, sequence=1, **now) for rank in (-1, 2)]
    for message in (*sent, replace(HELLOS[0], job="other")):
        data = Signer(KEY).seal(message).encode()
        receiver.receive(data, 0.0, cast(Any, None), epoch, lambda _, message: None)
    assert receiver.refused == {"malformed": 2, "stale": 1}


def test_a_message_that_is_refused_uses_up_no_sequence_number() -> None:
    """A rank's listing or offer that comes too early is acted on when it is repeated, and is no sign of life."""
    receiver, epoch, members = opened()
    members.accept(HELLOS[0], 0.0)
    acted: list[RankMessage] = []
    refusals = [StaleMessageError("not requested"), ControlError("malformed")]

    def act(_: Epoch, message: RankMessage) -> None:
        if refusals:
            raise refusals.pop(0)
        acted.append(message)

    listing = Listing(**epoch.fence, rank=0, sequence=5, version=0, rows=0, sha256="", error="")
    data = Signer(KEY).seal(listing).encode()
    for now in (1.0, 2.0):
        receiver.receive(data, now, cast(Any, None), epoch, act)
    assert receiver.refused == {"stale": 1, "malformed": 1}
    assert members._attempts["a"][0].heard_at == 0.0
    receiver.receive(data, 3.0, cast(Any, None), epoch, act)
    assert acted == [listing]
    assert members._attempts["a"][0].heard_at == 3.0
    receiver.receive(data, 4.0, cast(Any, None), epoch, act)
    assert receiver.refused["replayed"] == 1


def test_a_refused_hello_uses_up_no_sequence_number() -> None:
    receiver, _, members = opened()
    members.accept(replace(HELLOS[0], session="its predecessor", sequence=9), 0.0)
    refused: list[object] = []
    store = cast(Any, type("Store", (), {"refuse": staticmethod(refused.append)}))
    data = Signer(KEY).seal(HELLOS[0]).encode()
    receiver.receive(data, 1.0, store, None, lambda *_: None)
    assert receiver.refused == {"identity": 1}
    # The process before has been silent for long enough.
    receiver.receive(data, 10.0, store, None, lambda *_: None)
    assert receiver.refused == {"identity": 1}
    assert members._attempts["a"][0].hello == HELLOS[0]
