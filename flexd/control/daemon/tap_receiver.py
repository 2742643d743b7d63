"""The daemon's side of shipping counted accesses: asks the ranks for their deltas, a bounded number of bytes at a time.

The conversation is drawn in ``flexd.control.agent.tap_sender``. Everything here belongs to the coordinator's thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flexd.control.agent.tap_sender import PIECE_BYTES
from flexd.control.daemon.control_store import ControlStore
from flexd.control.daemon.membership import Topology
from flexd.control.protocol.messages import TapOffer, TapState, open_with_bytes
from flexd.core.errors import AuthenticationError, ControlError, StaleMessageError
from flexd.core.tap_counts import MAX_PAYLOAD_BYTES
from flexd.stream.tap_source import DeltaState, TapSource, partition_of

MAX_GRANTED_BYTES = MAX_PAYLOAD_BYTES
"""Deltas under way or not yet counted, of all ranks together (the largest single one is as large)."""
_PIECES_PER_TICK = 8
_RETRY_SECONDS = 1.0
"""A delta of which a piece was bad is asked for again after so long."""
_URGENT_SECONDS = 0.25
"""Between two snapshots that ranks ask for."""
NO_TAP = "the daemon's stream.source is of another kind than tap"


@dataclass
class _Wish:
    """What one rank offers, and what of it has come."""

    offer: TapOffer
    partition: str
    granted: bool = False
    not_before: float = 0.0
    pieces: list[bytes] = field(default_factory=list)
    told: TapState | None = None


class TapReceiver:
    """One job's deltas, epoch after epoch.

    Args:
        source: where complete deltas go; None tells the ranks that nobody wants them.
        on_urgent: called when a rank that is about to end waits for a snapshot; must not block.
    """

    def __init__(self, store: ControlStore, source: TapSource | None, on_urgent: Callable[[], None]) -> None:
        self._store = store
        self._source = source
        self._on_urgent = on_urgent
        self._wishes: dict[int, _Wish] = {}
        """By rank, in order of their offers: who offered first is asked first."""
        self._grants = 0
        self._urgent_at = 0.0
        self._fence: dict[str, Any] = {}
        self._sessions: tuple[str, ...] = ()
        self.refused: Counter[str] = Counter()
        """Pieces that were not what was announced, by kind: forged, stale, malformed."""

    def begin_epoch(self, fence: dict[str, Any], topology: Topology) -> None:
        """All ranks are here; what they hold they will offer anew."""
        self._wishes.clear()
        self._grants = 0
        self._fence = fence
        self._sessions = tuple(hello.session for hello in topology.hellos)
        if self._source is not None:
            self._source.alive([
                partition_of(topology.attempt, rank, session) for rank, session in enumerate(self._sessions)
            ])  # fmt: skip

    def end_epoch(self) -> None:
        self._wishes.clear()

    def offered(self, offer: TapOffer) -> None:
        """Raises ControlError: no rank can mean that."""
        if self._sessions[offer.rank] != offer.session:
            raise StaleMessageError(f"an offer of another process than rank {offer.rank}")
        pieces = max(1, -(-offer.bytes // PIECE_BYTES))
        if offer.delta < 0 or not 0 < offer.bytes <= MAX_PAYLOAD_BYTES or offer.pieces != pieces:
            raise ControlError(f"rank {offer.rank} offers {offer.bytes} bytes in {offer.pieces} pieces")
        before = self._wishes.pop(offer.rank, None)
        wish = _Wish(offer, partition_of(offer.attempt, offer.rank, offer.session))
        if before is not None:
            wish.told = before.told
            if (before.offer.delta, before.offer.bytes) == (offer.delta, offer.bytes):
                wish.granted, wish.pieces = before.granted, before.pieces
        self._wishes[offer.rank] = wish

    def tick(self) -> None:
        """Grants, takes pieces, delivers, acknowledges. Raises channel errors."""
        if self._source is None:
            for wish in self._wishes.values():
                self._tell(wish, 0, NO_TAP)
            return
        urgent = False
        under_way = self._source.queued_bytes + sum(w.offer.bytes for w in self._wishes.values() if w.granted)
        budget = _PIECES_PER_TICK
        for rank, wish in list(self._wishes.items()):
            state = self._source.offered(wish.partition, wish.offer.delta)
            if state is DeltaState.DURABLE:
                del self._wishes[rank]
                self._tell(wish, self._source.durable(wish.partition), "")
            elif state is DeltaState.TAKEN:
                wish.granted = False
                urgent |= wish.offer.urgent
            elif state is DeltaState.WANTED and wish.granted:
                budget -= self._receive_some(wish, budget)
            elif state is DeltaState.WANTED and time.monotonic() >= wish.not_before:
                if under_way and under_way + wish.offer.bytes > MAX_GRANTED_BYTES:
                    continue
                under_way += wish.offer.bytes
                self._grants += 1
                wish.granted, wish.pieces = True, []
                self._tell(wish, self._source.durable(wish.partition), "", grant=self._grants)
        if urgent and time.monotonic() >= self._urgent_at:
            self._urgent_at = time.monotonic() + _URGENT_SECONDS
            self._on_urgent()

    def _receive_some(self, wish: _Wish, budget: int) -> int:
        """Takes up to ``budget`` pieces that are there; returns how many. A bad one is counted by kind, and the delta
        asked for anew a little later."""
        taken = 0
        try:
            while taken < budget and len(wish.pieces) < wish.offer.pieces:
                if not self._receive(wish):
                    return taken
                taken += 1
            if len(wish.pieces) == wish.offer.pieces:
                self._deliver(wish)
        except AuthenticationError:
            self._refuse(wish, "forged")
        except StaleMessageError:
            self._refuse(wish, "stale")
        except ControlError:
            self._refuse(wish, "malformed")
        return taken

    def _receive(self, wish: _Wish) -> bool:
        offer, number = wish.offer, len(wish.pieces)
        grant = self._grant_of(wish)
        sealed = self._store.take_tap_piece(offer.epoch, offer.rank, grant, number)
        if sealed is None:
            return False
        header, data = open_with_bytes(self._store.signer, sealed, PIECE_BYTES)
        said = (header.rank, header.delta, header.grant, header.piece)
        if said != (offer.rank, offer.delta, grant, number):
            raise StaleMessageError(f"a piece of rank {offer.rank} that was not asked for")
        if any(getattr(header, name) != value for name, value in self._fence.items()):
            raise StaleMessageError(f"a piece of rank {offer.rank} of another attempt, generation or epoch")
        wish.pieces.append(data)
        return True

    def _deliver(self, wish: _Wish) -> None:
        payload, wish.pieces, wish.granted = b"".join(wish.pieces), [], False
        if len(payload) != wish.offer.bytes:
            raise ControlError(f"{len(payload)} bytes of the {wish.offer.bytes} that rank {wish.offer.rank} offered")
        if self._source is not None:
            self._source.deliver(wish.partition, wish.offer.delta, payload)

    def _refuse(self, wish: _Wish, kind: str) -> None:
        self.refused[kind] += 1
        for piece in range(wish.offer.pieces):
            self._store.take_tap_piece(wish.offer.epoch, wish.offer.rank, self._grant_of(wish), piece)
        wish.granted, wish.pieces = False, []
        wish.not_before = time.monotonic() + _RETRY_SECONDS

    @staticmethod
    def _grant_of(wish: _Wish) -> int:
        return wish.told.grant if wish.told is not None else 0

    def _tell(self, wish: _Wish, acknowledged: int, problem: str, grant: int | None = None) -> None:
        state = TapState(
            **self._fence, rank=wish.offer.rank, session=wish.offer.session, acknowledged=acknowledged,
            grant=self._grant_of(wish) if grant is None else grant,
            delta=wish.offer.delta, problem=problem,
        )  # fmt: skip
        if state != wish.told:
            self._store.tell_tap(state)
            wish.told = state
