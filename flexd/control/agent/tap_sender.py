"""Sending of counted accesses: offers the outbox's payload, and sends it in pieces on request.

::

    rank -> daemon   TapOffer: number, bytes and pieces of a payload
    daemon -> rank   TapState: request (a new ``grant``)
    rank -> daemon   TapPiece: the bytes, a piece at a turn
    daemon -> rank   TapState: a snapshot holds all payloads before number ``acknowledged``

Only granted payloads are sent, so the daemon's memory is bounded by what it grants; a rank has one payload under way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from flexd.control.agent.tap_outbox import TapOutbox
from flexd.control.protocol.messages import Message, TapOffer, TapPiece, TapState
from flexd.control.protocol.rows import Bytes
from flexd.core.errors import StaleMessageError
from flexd.core.tap_counts import FORMAT

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**20


class TapSender:
    """Sends the payloads of one rank in one epoch; belongs to the agent's thread.

    Args:
        fence: the fields of ``EpochMessage``.
        session: identifies this training process.
        send: sends a message with its body to the daemon; raises a channel error.
    """

    def __init__(
        self,
        outbox: TapOutbox,
        fence: Mapping[str, Any],
        rank: int,
        session: str,
        send: Callable[[Message, Bytes], None],
        next_sequence: Callable[[], int],
    ) -> None:
        self._outbox = outbox
        self._fence = dict(fence)
        self._rank = rank
        self._session = session
        self._send = send
        self._next_sequence = next_sequence
        self._offered = (-1, False)
        self._grant = 0
        self._next_piece: int | None = None
        self._state: TapState | None = None

    def record_state(self, state: TapState) -> None:
        """Receive the daemon's newest state. Raises StaleMessageError: it is of another epoch or rank."""
        if any(getattr(state, name) != value for name, value in self._fence.items()) or state.rank != self._rank:
            raise StaleMessageError("a tap message of another attempt, generation, epoch or rank")
        if state.session == self._session:
            self._state = state

    def advance(self) -> bool:
        """Do what is due, at most one piece; True if there is more to do at once. Raises channel errors."""
        counts = self._outbox.current()
        if counts is None:
            return False
        pieces = max(1, -(-len(counts.payload) // PIECE_BYTES))
        offer = (counts.sequence, self._outbox.urgent)
        if offer != self._offered:
            self._send(
                TapOffer(
                    **self._fence, rank=self._rank, sequence=self._next_sequence(), session=self._session,
                    number=counts.sequence, bytes=len(counts.payload), pieces=pieces, urgent=self._outbox.urgent,
                    format=FORMAT,
                ),
                b"",
            )  # fmt: skip
            self._offered = offer
        state = self._state
        if state is None:
            return False
        if self._outbox.set_problem(state.problem) and state.problem:
            logger.warning("rank %d: counted accesses stay here: %s", self._rank, state.problem)
        if state.acknowledged > counts.sequence:
            self._outbox.acknowledge(counts.sequence)
            self._next_piece = None
            return True
        # A replayed older state of this epoch has no newer grant and requests nothing.
        if state.grant > self._grant and state.number == counts.sequence:
            self._grant, self._next_piece = state.grant, 0
        if self._next_piece is None or self._next_piece >= pieces:
            return False
        self._send_piece(counts.sequence, self._next_piece, counts.payload)
        self._next_piece += 1
        return True

    def _send_piece(self, number: int, piece: int, payload: bytes) -> None:
        data = memoryview(payload)[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]
        header = TapPiece(
            **self._fence,
            rank=self._rank,
            sequence=self._next_sequence(),
            number=number,
            grant=self._grant,
            piece=piece,
            sha256=sha256(data).hexdigest(),
        )
        self._send(header, data)
