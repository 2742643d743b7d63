"""Offers, grants and pieces of a rank's counted accesses, against a store that is a dictionary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flexd.control.agent.tap_outbox import TapOutbox
from flexd.control.agent.tap_sender import PIECE_BYTES, TapSender
from flexd.control.protocol.messages import Message, Signer, TapOffer, TapPiece, TapState, open_with_bytes
from flexd.control.protocol.store_keys import Keys
from flexd.core.errors import AuthenticationError, StaleMessageError
from tests.support.ranks_in_threads import SECRET

FENCE: dict[str, Any] = {"job": "job", "attempt": "a1", "generation": 1, "epoch": 5, "token": "token", "term": 3}
RANK, SESSION = 3, "session"
SIGNER = Signer(SECRET)


class DictStore:
    """The calls of ``StoreClient`` that a tap sender makes."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def check(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> bytes:
        return bytes(self.values[key])

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def call(self, action: Callable[[DictStore], Any]) -> Any:
        return action(self)


class Channel:
    """A tap sender with its outbox, its store and the messages that it pushed."""

    def __init__(self) -> None:
        self.outbox, self.store = TapOutbox(), DictStore()
        self.pushed: list[Message] = []
        self.sender = TapSender(
            self.outbox, SIGNER, self.store, FENCE, RANK, SESSION, self.pushed.append,  # type: ignore[arg-type]
            lambda: len(self.pushed),
        )  # fmt: skip

    def set_state(self, signer: Signer = SIGNER, **changes: Any) -> None:
        """Write a state as the daemon does."""
        state = TapState(**FENCE, rank=RANK, session=SESSION, number=0, grant=0, acknowledged=0, problem="")
        key = Keys.tap_state(FENCE["epoch"], RANK)
        self.store.values[key] = signer.seal(replace(state, **changes)).encode()

    def pieces(self, grant: int) -> dict[int, bytes]:
        """Return the data by number of the pieces that were sent for a grant."""
        sent = {}
        for key, sealed in self.store.values.items():
            if "state" not in key:
                header, data = open_with_bytes(SIGNER, sealed, PIECE_BYTES)
                assert isinstance(header, TapPiece)
                assert key == Keys.tap_piece(5, RANK, header.grant, header.piece)
                if header.grant == grant:
                    sent[header.piece] = data
        return sent


def test_an_empty_outbox_sends_nothing() -> None:
    channel = Channel()
    assert not channel.sender.advance()
    assert (channel.pushed, channel.store.values) == ([], {})


def test_a_payload_is_offered_once_and_again_when_it_becomes_urgent() -> None:
    channel = Channel()
    channel.outbox.put(b"x" * (PIECE_BYTES + 1))
    for _ in range(3):
        assert not channel.sender.advance()
    assert channel.pushed == [TapOffer(**FENCE, rank=RANK, sequence=0, session=SESSION, number=0,  # type: ignore[arg-type]
                                       bytes=PIECE_BYTES + 1, pieces=2, urgent=False)]  # fmt: skip
    channel.outbox.wait_until_free(0.0, urgent=True)
    for _ in range(3):
        channel.sender.advance()
    assert [(offer.number, offer.urgent) for offer in channel.pushed] == [(0, False), (0, True)]  # type: ignore[attr-defined]


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
    assert [offer.number for offer in channel.pushed] == [0, 1]  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("changes", [{"job": "b"}, {"attempt": "a0"}, {"epoch": 4}, {"term": 2}, {"rank": 2}])
def test_a_state_of_another_fence_or_rank_is_an_error(changes: dict[str, Any]) -> None:
    channel = Channel()
    channel.outbox.put(b"payload")
    channel.set_state(grant=1, **changes)
    with pytest.raises(StaleMessageError):
        channel.sender.advance()
    assert channel.pieces(1) == {}


def test_a_forged_state_is_an_error() -> None:
    channel = Channel()
    channel.outbox.put(b"payload")
    channel.set_state(Signer(b"guess"), grant=1)
    with pytest.raises(AuthenticationError):
        channel.sender.advance()
    assert channel.pieces(1) == {}
