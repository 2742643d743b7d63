"""The daemon's side of one epoch: the settled ranks, their connections, and each rank's agreed and applied version."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.control.daemon.membership import Topology
from flexd.control.daemon.pusher import NumberedChunk
from flexd.control.daemon.rank_channels import RankChannels
from flexd.control.protocol.messages import (
    ChunkHeader,
    ChunkPiece,
    ChunkRefused,
    EpochAnnouncement,
    EpochEnd,
    EpochGo,
    Listing,
    ListingPiece,
    ListRequest,
    Progress,
    Settled,
    TapOffer,
    TapPiece,
)
from flexd.control.protocol.network import new_token
from flexd.control.protocol.rows import MAX_ROWS, Bytes, RowsAssembly, delta_tiers, pieces_of, rows_body
from flexd.core.errors import AuthenticationError, ControlError, PlacementError, ReplayedMessageError, StaleMessageError
from flexd.core.fault_points import fault_point
from flexd.core.placement import Placement

RankMessage = Settled | Progress | ChunkRefused | Listing | ListingPiece | TapOffer | TapPiece

REPORT_SECONDS = 0.2
"""Shortest time between two reports of a rank."""
REPORTS_PER_SECOND = 2_500
"""Of all ranks together: with more ranks, each reports less often."""


class EpochFailedError(ControlError):
    """A message in order whose content ends the epoch."""


class Phase(Enum):
    SETTLING = "settling"
    LISTING = "listing"
    LIVE = "live"


class Epoch:
    """Announces itself when made. Every method belongs to the coordinator's thread; a channel error that one raises
    ends the epoch.

    Attributes:
        version, digest: of the placement that all ranks agreed on when they had settled.
        listed_placement: the placement that the ranks listed; None if the daemon's journal had it.
        peers: the connection of each rank.
    """

    def __init__(
        self,
        channels: RankChannels,
        topology: Topology,
        job: str,
        instance: str,
        generation: int,
        number: int,
        timeout_seconds: float,
        total_rows: int,
        exchange: str = "",
    ) -> None:
        self._channels = channels
        self._exchange = exchange
        self.topology = topology
        self.number = number
        self.peers = channels.peers_of(topology)
        self.phase = Phase.SETTLING
        self.version = 0
        self.digest = 0
        self.listed_placement: Placement | None = None
        self._timeout = timeout_seconds
        self._total_rows = total_rows
        self._deadline = time.monotonic() + timeout_seconds
        self._fence: dict[str, Any] = {
            "job": job, "attempt": topology.attempt, "generation": generation, "epoch": number, "token": new_token(),
        }  # fmt: skip
        world = topology.layout.world_size
        self._sequence = [0] * world
        self._agreed = [0] * world
        self._applied = [0] * world
        self._settled: dict[int, Settled] = {}
        self._listings: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = {}
        self._assemblies: dict[int, RowsAssembly] = {}
        self._listing_ranks: tuple[int, ...] = ()
        self._joined = False
        fault_point("epoch.begin")
        report_seconds = max(REPORT_SECONDS, world / REPORTS_PER_SECOND)
        for peer, nonce in zip(self.peers, topology.nonces, strict=True):
            announcement = EpochAnnouncement(
                instance=instance, nonce=nonce, report_seconds=report_seconds, **self._fence
            )
            channels.send([peer], announcement)
        fault_point("epoch.announced")

    @property
    def fence(self) -> dict[str, Any]:
        """The fields of ``EpochMessage`` that every message of this epoch carries."""
        return dict(self._fence)

    @property
    def agreed_by_all(self) -> int:
        return min(self._agreed)

    @property
    def applied_by_all(self) -> int:
        return min(self._applied)

    def check(self, message: RankMessage, peer: int) -> None:
        """Check the fence, rank, connection and sequence of a message. It uses up its sequence number by ``accept``
        only.

        Raises:
            StaleMessageError: the message is of another epoch.
            ReplayedMessageError: it is not newer than an earlier message of this rank.
        """
        if any(getattr(message, name) != value for name, value in self._fence.items()):
            raise StaleMessageError(f"a {message.kind} message of another attempt, generation or epoch")
        if not 0 <= message.rank < len(self._sequence):
            raise ControlError(f"a {message.kind} message of rank {message.rank}")
        if self.peers[message.rank] != peer:
            raise StaleMessageError(f"a {message.kind} message of rank {message.rank} on another rank's connection")
        if message.sequence <= self._sequence[message.rank]:
            raise ReplayedMessageError(f"a {message.kind} message of rank {message.rank} was received before")

    def accept(self, message: RankMessage) -> None:
        """Record that a checked message was acted on: it and earlier ones of its rank are refused from now on."""
        self._sequence[message.rank] = message.sequence

    def record_settled(self, message: Settled) -> None:
        self._settled[message.rank] = message
        self._agreed[message.rank] = message.agreed_version
        self._applied[message.rank] = message.applied_version

    def record_progress(self, message: Progress) -> None:
        self._agreed[message.rank] = max(self._agreed[message.rank], message.agreed_version)
        self._applied[message.rank] = max(self._applied[message.rank], message.applied_version)

    def record_listing(self, message: Listing, body: Bytes) -> None:
        """Receive the list of one rank, or its first piece. Raises ControlError if the rank has none."""
        if (
            self.phase is not Phase.LISTING
            or message.rank not in self._listing_ranks
            or message.version != self.version
        ):
            raise StaleMessageError(f"a listing of rank {message.rank} that was not requested")
        if message.error:
            raise EpochFailedError(
                f"the placement is lost and rank {message.rank} cannot list it: {message.error}",
                remedy="start the job as a new attempt",
            )
        if message.rows > self._total_rows:
            raise EpochFailedError(f"rank {message.rank} lists {message.rows} of {self._total_rows} rows")
        self._assemblies[message.rank] = RowsAssembly(message.rows, 1, message.sha256, MAX_ROWS)
        self._add_listed_rows(message.rank, body)

    def record_listing_piece(self, message: ListingPiece, body: Bytes) -> None:
        """Receive a further piece of a list. Raises ControlError if it does not belong there."""
        assembly = self._assemblies.get(message.rank)
        if assembly is None or assembly.next_piece != message.piece:
            raise StaleMessageError(f"piece {message.piece} of a listing of rank {message.rank} that was not requested")
        self._add_listed_rows(message.rank, body)

    def _add_listed_rows(self, rank: int, body: Bytes) -> None:
        try:
            if self._assemblies[rank].add(body):
                self._listings[rank] = self._assemblies.pop(rank).rows()
        except AuthenticationError as error:
            raise EpochFailedError(f"the list of rank {rank} is not what it announced") from error
        except ControlError as error:
            raise EpochFailedError(f"the list of rank {rank} cannot be read: {error.message}") from error

    def advance(self, placement_is_known: Callable[[int, int], bool], now: float) -> bool:
        """Enter the next phase if it is due; True if it is LIVE now. Raises ControlError if it takes too long."""
        if self.phase is Phase.SETTLING and len(self._settled) == len(self._sequence):
            self._join()
            if placement_is_known(self.version, self.digest):
                self.phase = Phase.LIVE
                return True
            self._request_lists(now)
            return False
        if self.phase is Phase.LISTING and len(self._listings) == len(self._listing_ranks):
            self.listed_placement = self._merge_listings()
            self.phase = Phase.LIVE
            return True
        if now > self._deadline:
            missing = [rank for rank in range(len(self._sequence)) if rank not in self._settled]
            raise ControlError(
                f"ranks {missing[:8]} did not settle in {self._timeout:g} s"
                if self.phase is Phase.SETTLING
                else f"the ranks did not list their placement in {self._timeout:g} s",
                remedy="a rank may be stopped, or a training step may hang",
            )
        return False

    def push(self, chunk: NumberedChunk) -> None:
        """Send one chunk to all ranks; does not wait."""
        if not self._joined:
            raise ControlError(f"the ranks have not joined epoch {self.number}")
        body = rows_body(chunk.delta.keys, delta_tiers(chunk.delta))
        header = ChunkHeader(
            **self._fence, plan_id=chunk.plan_id, version=chunk.version, rows=len(chunk.delta.keys),
            sha256=hashlib.sha256(body).hexdigest(),
        )  # fmt: skip
        first, *others = pieces_of(body)
        fault_point("chunk.announce")
        self._channels.send(self.peers, header, first)
        fault_point("chunk.announced")
        fault_point("chunk.half_sent")
        for number, piece in enumerate(others, start=1):
            self._channels.send(self.peers, ChunkPiece(**self._fence, version=chunk.version, piece=number), piece)
        fault_point("chunk.sent")

    def close(self) -> None:
        """Make the ranks leave."""
        fault_point("epoch.end")
        self._joined = False
        self._channels.send(self.peers, EpochEnd(**self._fence))
        fault_point("epoch.ended")

    def _join(self) -> None:
        first = self._settled[0]
        differing = [
            f"rank {message.rank} is at version {message.agreed_version}"
            for message in self._settled.values()
            if (message.agreed_version, message.agreed_digest) != (first.agreed_version, first.agreed_digest)
        ]
        if differing:
            raise ControlError(
                f"the ranks do not agree on the placement: rank 0 is at version {first.agreed_version}, "
                f"{', '.join(sorted(differing)[:8])}",
                remedy="ranks of one attempt must start together: restart the job as a new attempt",
            )
        self.version, self.digest = first.agreed_version, first.agreed_digest
        fault_point("epoch.settled")
        self._channels.send(self.peers, EpochGo(**self._fence, exchange=self._exchange))
        fault_point("epoch.go")
        self._joined = True
        fault_point("epoch.joined")

    def _request_lists(self, now: float) -> None:
        """Request the lists of one node's ranks, which together are the placement. The next epoch uses another node."""
        layout = self.topology.layout
        self._listing_ranks = tuple(layout.node_ranks(self.number % layout.nodes))
        self._deadline = now + self._timeout
        self.phase = Phase.LISTING
        peers = [self.peers[rank] for rank in self._listing_ranks]
        self._channels.send(peers, ListRequest(**self._fence, version=self.version))

    def _merge_listings(self) -> Placement:
        keys = np.concatenate([keys for keys, _ in self._listings.values()])
        tiers = np.concatenate([tiers for _, tiers in self._listings.values()])
        keys, first = np.unique(keys, return_index=True)
        try:
            placement = Placement.of(keys, tiers[first], self.version)
        except PlacementError as error:
            raise ControlError(f"the ranks' lists are no valid placement: {error.message}") from error
        if placement.digest() != self.digest:
            first_rank, last_rank = self._listing_ranks[0], self._listing_ranks[-1]
            raise ControlError(
                f"the {len(placement)} rows that ranks {first_rank}..{last_rank} list are not the placement "
                f"that they agreed on (version {self.version})",
                remedy="the lists of the next node are requested; if this repeats, start the job as a new attempt",
            )
        return placement
