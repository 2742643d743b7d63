"""A rank's counted accesses on their way to the daemon: kept until a snapshot holds them, sent in pieces on request.

::

    rank -> daemon   TapOffer: number and bytes of a payload
    daemon -> rank   TapState: request (a new ``grant``)
    rank -> daemon   TapPiece: the bytes, a piece at a turn
    daemon -> rank   TapState: a snapshot holds all payloads before number ``acknowledged``

Only granted payloads are sent, so the daemon's memory is bounded by what it grants; a rank has one payload under way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from flexd.control.protocol.messages import PIECE_BYTES, Bytes, ControlMessage, Fence, TapOffer, TapPiece, TapState
from flexd.core.tap_counts import FORMAT

logger = logging.getLogger(__name__)


class TapSender:
    """Sends the payloads of one rank in one epoch; belongs to the agent's thread.

    Args:
        fence: of the epoch.
        send: sends a message with its body to the daemon; raises a channel error.

    Attributes:
        state: the daemon's newest one.
    """

    def __init__(
        self, outbox: TapOutbox, fence: Fence, rank: int, send: Callable[[ControlMessage, Bytes], None]
    ) -> None:
        self._outbox = outbox
        self._fence = fence
        self._rank = rank
        self._send = send
        self._offered = (-1, False)
        self._grant = 0
        # Of the granted payload; None without a grant.
        self._sent_bytes: int | None = None
        self.state: TapState | None = None

    def advance(self) -> bool:
        """Do what is due, at most one piece; True if there is more to do at once. Raises channel errors."""
        counts = self._outbox.counts
        if counts is None:
            return False
        offer = (counts.sequence, self._outbox.urgent)
        if offer != self._offered:
            self._send(TapOffer(self._fence, counts.sequence, len(counts.payload), self._outbox.urgent, FORMAT), b"")
            self._offered = offer
        state = self.state
        if state is None:
            return False
        if state.problem and state.problem != self._outbox.problem:
            logger.warning("rank %d: counted accesses stay here: %s", self._rank, state.problem)
        self._outbox.problem = state.problem
        if state.acknowledged > counts.sequence:
            self._outbox.acknowledge(counts.sequence)
            self._sent_bytes = None
            return True
        if state.grant > self._grant and state.number == counts.sequence:
            self._grant, self._sent_bytes = state.grant, 0
        if self._sent_bytes is None or self._sent_bytes >= len(counts.payload):
            return False
        piece = memoryview(counts.payload)[self._sent_bytes : self._sent_bytes + PIECE_BYTES]
        self._sent_bytes += len(piece)
        self._send(TapPiece(self._fence, self._grant), piece)
        return True


@dataclass(frozen=True)
class EncodedCounts:
    """One payload of counted accesses.

    Attributes:
        sequence: counts the payloads of this process from 0.
        payload: encoded ``TapCounts``.
    """

    sequence: int
    payload: bytes


class TapOutbox:
    """Holds at most one payload. ``put`` and ``free`` belong to the tap's thread, the rest to the agent's.

    A payload leaves only when the daemon has reported that a snapshot holds it; until then the same bytes with the same
    sequence number are offered again, to any daemon that connects. So each is counted exactly once: a daemon that has
    it in its snapshot recognises the number.

    Attributes:
        counts: the payload; None while there is none.
        acknowledged: payloads that snapshots hold.
        problem: why the daemon accepts nothing; empty if it does, or has not answered yet.
        urgent: whether a caller waits for the acknowledgement.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self.counts: EncodedCounts | None = None
        self._next = 0
        self.urgent = False
        self.problem = ""
        self.on_change: Callable[[], None] = lambda: None
        """Called, from any thread, when there is something to offer."""
        self.acknowledged = 0

    @property
    def free(self) -> bool:
        return self.counts is None

    def put(self, payload: bytes) -> int:
        """Store the next payload and return its sequence number. Call it only while ``free``."""
        with self._lock:
            self.counts = counts = EncodedCounts(self._next, payload)
            self._next += 1
        self.on_change()
        return counts.sequence

    def acknowledge(self, sequence: int) -> None:
        """Drop the payload that a snapshot holds. A repeated older number changes nothing."""
        with self._lock:
            if self.counts is not None and self.counts.sequence == sequence:
                self.acknowledged += 1
                self.counts = None
                self._lock.notify_all()

    def wait_until_free(self, timeout_seconds: float, *, urgent: bool = False) -> bool:
        """Wait for the acknowledgement; ``urgent`` makes the daemon write a snapshot before its next regular one."""
        self.urgent = self.urgent or urgent
        self.on_change()
        with self._lock:
            return self._lock.wait_for(lambda: self.counts is None, timeout_seconds)
