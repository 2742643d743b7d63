"""Receiving of the accesses that ranks have counted: requests their ``TapCounts``, a bounded number of bytes at a time.

The exchange of messages is drawn in ``flexd.control.agent.tap_outbox``. Everything here belongs to the coordinator's
thread.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flexd.control.daemon.epoch import RankChannels
from flexd.control.daemon.membership import Topology
from flexd.control.protocol.messages import PIECE_BYTES, Bytes, Fence, TapOffer, TapPiece, TapState
from flexd.core.errors import ControlError, StaleMessageError
from flexd.core.tap_counts import MAX_PAYLOAD_BYTES, NEWEST_FORMAT, OLDEST_FORMAT
from flexd.stream.tap_source import TapCountsState, TapSource, partition_of

MAX_GRANTED_BYTES = 64 * 2**20
"""Payloads requested or received and not yet counted, of all ranks together, or one larger payload alone. Below
``ChannelOptions.partial_bytes``: frames of all granted payloads may be under way at once."""
# Shortest time between two snapshots that ranks request.
_URGENT_SECONDS = 0.25
NO_TAP = "the daemon's stream.source is of another kind than tap"


@dataclass
class _Transfer:
    """The payload that one rank offers, and its pieces received so far."""

    rank: int
    offer: TapOffer
    partition: str
    granted: bool = False
    pieces: list[Bytes] = field(default_factory=list)
    sent: TapState | None = None


class TapReceiver:
    """Receives the counts of one job, epoch after epoch.

    Args:
        source: receives complete payloads.
        emit: is called with ``tap_urgent`` when a rank that is about to end waits for a snapshot.
    """

    def __init__(self, channels: RankChannels, source: TapSource, emit: Callable[..., None]) -> None:
        self._channels = channels
        self._source = source
        self._emit = emit
        # By rank, in order of their offers, which is the order of requests.
        self._transfers: dict[int, _Transfer] = {}
        self._grants = 0
        self._urgent_at = 0.0
        self._fence = Fence("", "", 0, 0, "")
        # Of each rank's process.
        self._partitions: tuple[str, ...] = ()
        self._peers: Sequence[int] = ()

    def begin_epoch(self, fence: Fence, topology: Topology, peers: Sequence[int]) -> None:
        """Drop all offers: in a new epoch the ranks offer again. ``peers``: the connection of each rank."""
        self._transfers.clear()
        self._peers = peers
        self._grants = 0
        self._fence = fence
        self._partitions = tuple(
            partition_of(topology.attempt, rank, hello.session) for rank, hello in enumerate(topology.hellos)
        )
        self._source.set_live(list(self._partitions))

    def end_epoch(self) -> None:
        self._transfers.clear()

    def record_offer(self, rank: int, offer: TapOffer) -> None:
        """Receive an offer, which replaces the rank's earlier one. Raises ControlError: it is not valid."""
        if offer.number < 0 or not 0 < offer.bytes <= MAX_PAYLOAD_BYTES:
            raise ControlError(f"rank {rank} offers {offer.bytes} bytes")
        before = self._transfers.pop(rank, None)
        transfer = _Transfer(rank, offer, self._partitions[rank])
        if before is not None:
            transfer.sent = before.sent
            if (before.offer.number, before.offer.bytes) == (offer.number, offer.bytes):
                transfer.granted, transfer.pieces = before.granted, before.pieces
        self._transfers[rank] = transfer

    def record_piece(self, rank: int, piece: TapPiece, body: Bytes) -> None:
        """Receive the next piece.

        Raises:
            StaleMessageError: it was not requested, or no longer is.
            ControlError: it has another length than it must have. The payload is requested again.
        """
        transfer = self._transfers.get(rank)
        if transfer is None or not transfer.granted or piece.grant != self._grant_of(transfer):
            raise StaleMessageError(f"a piece of rank {rank} that was not requested")
        if len(body) != min(PIECE_BYTES, transfer.offer.bytes - len(transfer.pieces) * PIECE_BYTES):
            transfer.granted = False
            raise ControlError(f"a piece of rank {rank} of {len(body)} bytes")
        transfer.pieces.append(body)
        if len(transfer.pieces) * PIECE_BYTES >= transfer.offer.bytes:
            payload, transfer.pieces, transfer.granted = b"".join(transfer.pieces), [], False
            self._source.deliver(transfer.partition, transfer.offer.number, payload)

    def tick(self) -> None:
        """Grant requests and acknowledge. Raises channel errors."""
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
            elif state is TapCountsState.MISSING and not transfer.granted:
                if under_way and under_way + transfer.offer.bytes > MAX_GRANTED_BYTES:
                    continue
                under_way += transfer.offer.bytes
                self._grants += 1
                transfer.granted, transfer.pieces = True, []
                self._write_state(transfer, self._source.durable_before(transfer.partition), "", grant=self._grants)
        if urgent and time.monotonic() >= self._urgent_at:
            self._urgent_at = time.monotonic() + _URGENT_SECONDS
            self._emit("tap_urgent")

    @staticmethod
    def _grant_of(transfer: _Transfer) -> int:
        return transfer.sent.grant if transfer.sent is not None else 0

    def _write_state(self, transfer: _Transfer, acknowledged: int, problem: str, grant: int | None = None) -> None:
        grant = self._grant_of(transfer) if grant is None else grant
        state = TapState(self._fence, acknowledged, grant, transfer.offer.number, problem)
        if state != transfer.sent:
            self._channels.send([self._peers[transfer.rank]], state)
            transfer.sent = state
