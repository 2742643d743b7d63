"""The daemon's side of one epoch: the settled ranks, their connections, each rank's agreed and applied version, and the
placement that all have agreed on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt

from flexd.control.daemon.journal import Chunk, PlacementJournal, Segment
from flexd.control.daemon.membership import Topology
from flexd.control.daemon.rank_channels import EpochFailedError, RankChannels
from flexd.control.protocol.messages import (
    Bytes,
    ChunkHeader,
    EpochAnnouncement,
    EpochEnd,
    EpochGo,
    EpochMessage,
    Fence,
    Listing,
    ListRequest,
    Progress,
    RowsAssembly,
    RowsPiece,
    Settled,
    delta_tiers,
    pieces_of,
    rows_body,
)
from flexd.core.errors import ControlError, PlacementError, SnapshotError, StaleMessageError
from flexd.core.placement import Placement
from flexd.core.supervision import fault_point

REPORT_SECONDS = 0.2
"""Shortest time between two reports of a rank."""
REPORTS_PER_SECOND = 2_500
"""Of all ranks together: with more ranks, each reports less often."""


class EpochPhase(Enum):
    SETTLING = "settling"
    LISTING = "listing"
    LIVE = "live"


class Epoch:
    """Announces itself when made. Every method belongs to the coordinator's thread; a channel error that one raises
    ends the epoch.

    Args:
        total_rows: of all tables; a rank cannot list more.
        exchange: that the planner prices lower; empty if it has priced none.

    Attributes:
        version, digest: of the placement that all ranks agreed on when they had settled.
        listed_placement: the placement that the ranks listed; None if the daemon's journal had it.
        peers: the connection of each rank.
    """

    def __init__(
        self,
        channels: RankChannels,
        topology: Topology,
        fence: Fence,
        timeout_seconds: float,
        total_rows: int,
        exchange: str = "",
    ) -> None:
        self._channels = channels
        self._exchange = exchange
        self.topology = topology
        self.fence = fence
        self.peers = channels.peers_of(topology)
        self._rank_of = {peer: rank for rank, peer in enumerate(self.peers)}
        self.phase = EpochPhase.SETTLING
        self.version = 0
        self.digest = 0
        self.listed_placement: Placement | None = None
        self._timeout = timeout_seconds
        self._total_rows = total_rows
        self._deadline = time.monotonic() + timeout_seconds
        world = topology.layout.world_size
        self._agreed = [0] * world
        self._applied = [0] * world
        self._settled: dict[int, Settled] = {}
        self._listings: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = {}
        self._assemblies: dict[int, RowsAssembly] = {}
        self._listing_ranks: tuple[int, ...] = ()
        fault_point("epoch.begin")
        report_seconds = max(REPORT_SECONDS, world / REPORTS_PER_SECOND)
        for peer, hello in zip(self.peers, topology.hellos, strict=True):
            channels.send([peer], EpochAnnouncement(fence, hello.nonce, report_seconds))
        fault_point("epoch.announced")

    @property
    def agreed_by_all(self) -> int:
        return min(self._agreed)

    @property
    def applied_by_all(self) -> int:
        return min(self._applied)

    def rank_of(self, message: EpochMessage, peer: int) -> int:
        """Return the rank that a message came from. Raises StaleMessageError: it is not of this epoch."""
        rank = self._rank_of.get(peer)
        if message.fence != self.fence or rank is None:
            raise StaleMessageError(f"a {message.kind} message of another attempt, generation or epoch")
        return rank

    def record_settled(self, rank: int, message: Settled) -> None:
        self._settled[rank] = message
        self._agreed[rank] = message.agreed.version
        self._applied[rank] = message.applied_version

    def record_progress(self, rank: int, message: Progress) -> None:
        self._agreed[rank] = max(self._agreed[rank], message.agreed_version)
        self._applied[rank] = max(self._applied[rank], message.applied_version)

    def record_listing(self, rank: int, message: Listing, body: Bytes) -> None:
        """Receive the list of one rank, or its first piece. Raises ControlError if the rank has none."""
        requested = self.phase is EpochPhase.LISTING and rank in self._listing_ranks
        if not requested or rank in self._listings or message.version != self.version:
            raise StaleMessageError(f"a listing of rank {rank} that was not requested")
        if message.error:
            raise EpochFailedError(
                f"the placement is lost and rank {rank} cannot list it: {message.error}",
                remedy="start the job as a new attempt",
            )
        if message.rows > self._total_rows:
            raise EpochFailedError(f"rank {rank} lists {message.rows} of {self._total_rows} rows")
        self._assemblies[rank] = RowsAssembly(message.rows, 1)
        self.record_listed_rows(rank, body)

    def record_listed_rows(self, rank: int, body: Bytes) -> None:
        """Receive a piece of a list. Raises ControlError if it does not belong there."""
        assembly = self._assemblies.get(rank)
        if assembly is None:
            raise StaleMessageError(f"rows of rank {rank} that were not requested")
        try:
            if assembly.add(body):
                self._listings[rank] = self._assemblies.pop(rank).rows()
        except ControlError as error:
            raise EpochFailedError(f"the list of rank {rank} cannot be read: {error.message}") from error

    def advance(self, placement_is_known: Callable[[int, int], bool], now: float) -> bool:
        """Enter the next phase if it is due; True if it is LIVE now. Raises ControlError if it takes too long."""
        if self.phase is EpochPhase.SETTLING and len(self._settled) == len(self.peers):
            self._join()
            if placement_is_known(self.version, self.digest):
                self.phase = EpochPhase.LIVE
                return True
            self._request_lists(now)
            return False
        if self.phase is EpochPhase.LISTING and len(self._listings) == len(self._listing_ranks):
            self.listed_placement = self._merge_listings()
            self.phase = EpochPhase.LIVE
            return True
        if now > self._deadline:
            missing = [rank for rank in range(len(self.peers)) if rank not in self._settled]
            raise ControlError(
                f"ranks {missing[:8]} did not settle in {self._timeout:g} s"
                if self.phase is EpochPhase.SETTLING
                else f"the ranks did not list their placement in {self._timeout:g} s",
                remedy="a rank may be stopped, or a training step may hang",
            )
        return False

    def push(self, chunk: Chunk) -> None:
        """Send one chunk to all ranks; does not wait."""
        plan_id = "" if chunk.migration is None else chunk.migration.plan_id
        first, *others = pieces_of(rows_body(chunk.delta.keys, delta_tiers(chunk.delta)))
        fault_point("chunk.announce")
        self._channels.send(self.peers, ChunkHeader(self.fence, plan_id, chunk.version, len(chunk.delta)), first)
        fault_point("chunk.announced")
        fault_point("chunk.half_sent")
        for piece in others:
            self._channels.send(self.peers, RowsPiece(self.fence), piece)
        fault_point("chunk.sent")

    def close(self) -> None:
        """Make the ranks leave."""
        fault_point("epoch.end")
        self._channels.send(self.peers, EpochEnd(self.fence))
        fault_point("epoch.ended")

    def _join(self) -> None:
        first = self._settled[0].agreed
        differing = [
            f"rank {rank} is at version {message.agreed.version}"
            for rank, message in self._settled.items()
            if message.agreed != first
        ]
        if differing:
            raise ControlError(
                f"the ranks do not agree on the placement: rank 0 is at version {first.version}, "
                f"{', '.join(sorted(differing)[:8])}",
                remedy="ranks of one attempt must start together: restart the job as a new attempt",
            )
        self.version, self.digest = first.version, first.digest
        fault_point("epoch.settled")
        self._channels.send(self.peers, EpochGo(self.fence, self._exchange))
        fault_point("epoch.go")
        fault_point("epoch.joined")

    def _request_lists(self, now: float) -> None:
        """Request the lists of one node's ranks, which together are the placement. The next epoch uses another node."""
        layout = self.topology.layout
        self._listing_ranks = tuple(layout.node_ranks(self.fence.epoch % layout.nodes))
        self._deadline = now + self._timeout
        self.phase = EpochPhase.LISTING
        peers = [self.peers[rank] for rank in self._listing_ranks]
        self._channels.send(peers, ListRequest(self.fence, self.version))

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


class AgreedPlacement:
    """Holds the agreed placement: before any rank is live, the newest placement of the journal.

    Any thread may read ``placement`` and ``version``; the rest belongs to the coordinator's thread.
    """

    def __init__(self, journal: PlacementJournal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self.version = journal.last_version
        self._placement = journal.placement_at(self.version)

    @property
    def placement(self) -> Placement:
        with self._lock:
            if self._placement.version != self.version:
                self._placement = self._journal.placement_at(self.version)
            return self._placement

    def continue_from(self, version: int, digest: int, segment: Segment) -> bool:
        """Continue from the version that the ranks of ``segment`` agreed on; False if the journal does not have it.

        Raises:
            SnapshotError: the journal cannot be written.
        """
        try:
            placement = self._journal.placement_at(version)
        except SnapshotError:
            placement = Placement.empty(version)
        if placement.digest() != digest and version == 0:
            placement = Placement.empty()
        if placement.digest() != digest:
            return False
        self.restart_from(placement, segment)
        return True

    def restart_from(self, placement: Placement, segment: Segment) -> None:
        """Continue from this placement, durably. Raises SnapshotError if the journal cannot be written."""
        try:
            known = (
                self._journal.segment == segment
                and self._journal.placement_at(placement.version).digest() == placement.digest()
            )
        except SnapshotError:
            known = False
        if not known:
            self._journal.begin(segment, placement)
        with self._lock:
            self._placement, self.version = placement, placement.version

    def advance(self, version: int) -> None:
        """Record that all ranks hold ``version``.

        Raises:
            SnapshotError: the journal could not be compacted; nothing else is lost.
        """
        if version <= self.version:
            return
        with self._lock:
            self.version = version
            fault_point("chunk.agreed")
            self._journal.compact(version)
