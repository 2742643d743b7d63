"""Receiving of the accesses that ranks have counted: requests their ``TapCounts``, a bounded number of bytes at a time.

The exchange of messages is drawn in ``flexd.control.agent.tap_outbox``. Everything here belongs to the coordinator's
thread.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flexd.control.agent.tap_outbox import PIECE_BYTES
from flexd.control.daemon.event_log import EventLog
from flexd.control.daemon.membership import Topology
from flexd.control.daemon.rank_channels import RankChannels
from flexd.control.protocol.messages import TapOffer, TapPiece, TapState
from flexd.control.protocol.rows import Bytes
from flexd.core.errors import AuthenticationError, ControlError, StaleMessageError
from flexd.core.tap_counts import MAX_PAYLOAD_BYTES, NEWEST_FORMAT, OLDEST_FORMAT
from flexd.stream.tap_source import TapCountsState, TapSource, partition_of

MAX_GRANTED_BYTES = 64 * 2**20
"""Payloads requested or received and not yet counted, of all ranks together, or one larger payload alone. Below
``ChannelOptions.partial_bytes``: frames of all granted payloads may be under way at once."""
_RETRY_SECONDS = 1.0
"""Time after which a payload with an invalid piece is requested again."""
_URGENT_SECONDS = 0.25
"""Shortest time between two snapshots that ranks request."""
NO_TAP = "the daemon's stream.source is of another kind than tap"


@dataclass
class _Transfer:
    """The payload that one rank offers, and its pieces received so far."""

    offer: TapOffer
    partition: str
    granted: bool = False
    not_before: float = 0.0
    pieces: list[Bytes] = field(default_factory=list)
    sent: TapState | None = None


class TapReceiver:
    """Receives the counts of one job, epoch after epoch.

    Args:
        source: receives complete payloads; None reports to the ranks that the daemon has another source.
        events: receives ``tap_urgent`` when a rank that is about to end waits for a snapshot.
    """

    def __init__(self, channels: RankChannels, source: TapSource | None, events: EventLog) -> None:
        self._channels = channels
        self._source = source
        self._events = events
        self._transfers: dict[int, _Transfer] = {}
        """By rank, in order of their offers, which is the order of requests."""
        self._grants = 0
        self._urgent_at = 0.0
        self._fence: dict[str, Any] = {}
        self._sessions: tuple[str, ...] = ()
        self._peers: Sequence[int] = ()
        self.refused: Counter[str] = Counter()
        """Number of invalid pieces by kind: forged, stale, malformed."""

    def begin_epoch(self, fence: dict[str, Any], topology: Topology, peers: Sequence[int]) -> None:
        """Drop all offers: in a new epoch the ranks offer again. ``peers``: the connection of each rank."""
        self._transfers.clear()
        self._peers = peers
        self._grants = 0
        self._fence = fence
        self._sessions = tuple(hello.session for hello in topology.hellos)
        if self._source is not None:
            self._source.set_live([
                partition_of(topology.attempt, rank, session) for rank, session in enumerate(self._sessions)
            ])  # fmt: skip

    def end_epoch(self) -> None:
        self._transfers.clear()

    def record_offer(self, offer: TapOffer) -> None:
        """Receive an offer, which replaces the rank's earlier one. Raises ControlError: it is not valid."""
        if self._sessions[offer.rank] != offer.session:
            raise StaleMessageError(f"an offer of another process than rank {offer.rank}")
        pieces = max(1, -(-offer.bytes // PIECE_BYTES))
        if offer.number < 0 or not 0 < offer.bytes <= MAX_PAYLOAD_BYTES or offer.pieces != pieces:
            raise ControlError(f"rank {offer.rank} offers {offer.bytes} bytes in {offer.pieces} pieces")
        before = self._transfers.pop(offer.rank, None)
        transfer = _Transfer(offer, partition_of(offer.attempt, offer.rank, offer.session))
        if before is not None:
            transfer.sent = before.sent
            if (before.offer.number, before.offer.bytes) == (offer.number, offer.bytes):
                transfer.granted, transfer.pieces = before.granted, before.pieces
        self._transfers[offer.rank] = transfer

    def record_piece(self, piece: TapPiece, body: Bytes) -> None:
        """Receive a piece. One of an earlier grant is dropped; an invalid one is counted by kind, and the payload
        requested again a little later."""
        transfer = self._transfers.get(piece.rank)
        if transfer is None or not transfer.granted or piece.grant != self._grant_of(transfer):
            self.refused["stale"] += piece.grant > self._grants
            return
        try:
            self._add(transfer, piece, body)
        except AuthenticationError:
            self._refuse(transfer, "forged")
        except StaleMessageError:
            self._refuse(transfer, "stale")
        except ControlError:
            self._refuse(transfer, "malformed")

    def tick(self) -> None:
        """Grant requests and acknowledge. Raises channel errors."""
        if self._source is None:
            for transfer in self._transfers.values():
                self._write_state(transfer, 0, NO_TAP)
            return
        urgent = False
        under_way = self._source.queued_bytes + sum(w.offer.bytes for w in self._transfers.values() if w.granted)
        for rank, transfer in list(self._transfers.items()):
            state = self._source.record_offer(transfer.partition, transfer.offer.number)
            if state is TapCountsState.DURABLE:
                del self._transfers[rank]
                self._write_state(transfer, self._source.durable_before(transfer.partition), "")
            elif state is TapCountsState.RECEIVED:
                transfer.granted = False
                urgent |= transfer.offer.urgent
            elif state is TapCountsState.MISSING and not OLDEST_FORMAT <= transfer.offer.format <= NEWEST_FORMAT:
                self._write_state(
                    transfer, self._source.durable_before(transfer.partition),
                    f"counts of format {transfer.offer.format}, this daemon reads {OLDEST_FORMAT} to {NEWEST_FORMAT}: "
                    f"upgrade the {'daemon' if transfer.offer.format > NEWEST_FORMAT else 'trainer'}",
                )  # fmt: skip
            elif state is TapCountsState.MISSING and not transfer.granted and time.monotonic() >= transfer.not_before:
                if under_way and under_way + transfer.offer.bytes > MAX_GRANTED_BYTES:
                    continue
                under_way += transfer.offer.bytes
                self._grants += 1
                transfer.granted, transfer.pieces = True, []
                self._write_state(transfer, self._source.durable_before(transfer.partition), "", grant=self._grants)
        if urgent and time.monotonic() >= self._urgent_at:
            self._urgent_at = time.monotonic() + _URGENT_SECONDS
            self._events.emit("tap_urgent")

    def _add(self, transfer: _Transfer, piece: TapPiece, body: Bytes) -> None:
        offer, number = transfer.offer, len(transfer.pieces)
        if (piece.number, piece.piece) != (offer.number, number):
            raise StaleMessageError(f"a piece of rank {offer.rank} that was not requested")
        if len(body) != min(PIECE_BYTES, offer.bytes - number * PIECE_BYTES):
            raise ControlError(f"piece {number} of rank {offer.rank} has {len(body)} bytes")
        if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), piece.sha256):
            raise AuthenticationError(f"piece {number} of rank {offer.rank} has other bytes than it announces")
        transfer.pieces.append(body)
        if len(transfer.pieces) == offer.pieces:
            self._deliver(transfer)

    def _deliver(self, transfer: _Transfer) -> None:
        payload, transfer.pieces, transfer.granted = b"".join(transfer.pieces), [], False
        if len(payload) != transfer.offer.bytes:
            raise ControlError(
                f"{len(payload)} bytes of the {transfer.offer.bytes} that rank {transfer.offer.rank} offered"
            )
        if self._source is not None:
            self._source.deliver(transfer.partition, transfer.offer.number, payload)

    def _refuse(self, transfer: _Transfer, kind: str) -> None:
        self.refused[kind] += 1
        transfer.granted, transfer.pieces = False, []
        transfer.not_before = time.monotonic() + _RETRY_SECONDS

    @staticmethod
    def _grant_of(transfer: _Transfer) -> int:
        return transfer.sent.grant if transfer.sent is not None else 0

    def _write_state(self, transfer: _Transfer, acknowledged: int, problem: str, grant: int | None = None) -> None:
        state = TapState(
            **self._fence, rank=transfer.offer.rank, session=transfer.offer.session, acknowledged=acknowledged,
            grant=self._grant_of(transfer) if grant is None else grant,
            number=transfer.offer.number, problem=problem,
        )  # fmt: skip
        if state != transfer.sent:
            self._channels.send([self._peers[state.rank]], state)
            transfer.sent = state
