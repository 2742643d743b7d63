"""Offers, grants and pieces of a rank's counted accesses, without a network."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from flexd.control.agent.tap_outbox import TapOutbox
from flexd.control.agent.tap_sender import PIECE_BYTES, TapSender
from flexd.control.protocol.messages import Message, TapOffer, TapPiece, TapState
from flexd.core.errors import StaleMessageError

FENCE: dict[str, Any] = {"job": "job", "attempt": "a1", "generation": 1, "epoch": 5, "token": "token"}
RANK, SESSION = 3, "session"


class Channel:
    """A tap sender with its outbox, and the messages with bodies that it sent."""

    def __init__(self) -> None:
        self.outbox = TapOutbox()
        self.sent: list[tuple[Message, bytes]] = []
        self.sender = TapSender(
            self.outbox, FENCE, RANK, SESSION, lambda message, body: self.sent.append((message, bytes(body))),
            lambda: len(self.sent),
        )  # fmt: skip

    def set_state(self, **changes: Any) -> None:
        """Send a state as the daemon does."""
        state = TapState(**FENCE, rank=RANK, session=SESSION, number=0, grant=0, acknowledged=0, problem="")
        self.sender.record_state(replace(state, **changes))

    @property
    def offers(self) -> list[TapOffer]:
        return [message for message, _ in self.sent if isinstance(message, TapOffer)]

    def pieces(self, grant: int) -> dict[int, bytes]:
        """Return the data by number of the pieces that were sent for a grant."""
        found = {}
        for message, data in self.sent:
            if isinstance(message, TapPiece) and message.grant == grant:
                assert message.sha256 == sha256(data).hexdigest()
                found[message.piece] = data
        return found


def test_an_empty_outbox_sends_nothing() -> None:
    channel = Channel()
    assert not channel.sender.advance()
    assert channel.sent == []


def test_a_payload_is_offered_once_and_again_when_it_becomes_urgent() -> None:
    channel = Channel()
    channel.outbox.put(b"x" * (PIECE_BYTES + 1))
    for _ in range(3):
        assert not channel.sender.advance()
    offer = TapOffer(**FENCE, rank=RANK, sequence=0, session=SESSION, number=0, bytes=PIECE_BYTES + 1, pieces=2)
    assert channel.sent == [(offer, b"")]
    channel.outbox.wait_until_free(0.0, urgent=True)
    for _ in range(3):
        channel.sender.advance()
    assert [(offer.number, offer.urgent) for offer in channel.offers] == [(0, False), (0, True)]


def test_nothing_is_sent_before_a_grant_and_then_one_piece_a_call() -> None:
    channel = Channel()
    payload = bytes(range(256)) * (2 * PIECE_BYTES // 256) + b"end"
    channel.outbox.put(payload)
    channel.set_state()
    assert not channel.sender.advance()
    assert channel.pieces(1) == {}
    channel.set_state(grant=1)
    for sent in (1, 2, 3):
        assert channel.sender.advance()
        assert len(channel.pieces(1)) == sent
    assert not channel.sender.advance()
    assert b"".join(data for _, data in sorted(channel.pieces(1).items())) == payload


def test_a_newer_grant_sends_the_payload_again_and_an_older_one_nothing() -> None:
    channel = Channel()
    channel.outbox.put(b"payload")
    for grant, sends in ((2, True), (2, False), (1, False), (3, True)):
        channel.set_state(grant=grant)
        assert channel.sender.advance() is sends
    assert (channel.pieces(1), channel.pieces(2), channel.pieces(3)) == ({}, {0: b"payload"}, {0: b"payload"})


@pytest.mark.parametrize("changes", [{"number": 1}, {"session": "an earlier process"}])
def test_a_grant_for_another_payload_or_process_sends_nothing(changes: dict[str, Any]) -> None:
    channel = Channel()
    channel.outbox.put(b"payload")
    channel.set_state(grant=1, **changes)
    assert not channel.sender.advance()
    assert channel.pieces(1) == {}


def test_an_acknowledged_payload_leaves_the_outbox_and_the_next_is_offered() -> None:
    channel = Channel()
    channel.outbox.put(b"first")
    channel.set_state(grant=1)
    assert channel.sender.advance()
    channel.set_state(grant=1, acknowledged=1)
    assert channel.sender.advance(), "there may be more to do at once"
    assert channel.outbox.free
    channel.outbox.put(b"second")
    assert not channel.sender.advance()
    assert [offer.number for offer in channel.offers] == [0, 1]
    assert channel.pieces(1) == {0: b"first"}


def test_the_outbox_shows_why_the_daemon_accepts_nothing() -> None:
    channel = Channel()
    channel.outbox.put(b"payload")
    channel.set_state(problem="the daemon reads no tap")
    channel.sender.advance()
    assert channel.outbox.problem == "the daemon reads no tap"
    channel.set_state()
    channel.sender.advance()
    assert channel.outbox.problem == ""


@pytest.mark.parametrize("changes", [{"job": "b"}, {"attempt": "a0"}, {"epoch": 4}, {"rank": 2}])
def test_a_state_of_another_fence_or_rank_is_an_error(changes: dict[str, Any]) -> None:
    channel = Channel()
    channel.outbox.put(b"payload")
    with pytest.raises(StaleMessageError):
        channel.set_state(grant=1, **changes)
    channel.sender.advance()
    assert channel.pieces(1) == {}
