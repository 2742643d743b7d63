"""The daemon's connections to the ranks, and its side of one epoch.

``RankChannels`` knows which connection speaks for which registration, and what may act of what they send. ``Epoch`` has
the settled ranks, and each rank's agreed and applied version.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexd.control.daemon.channel_events import ChannelQueues, Closed, Opened, Received
from flexd.control.daemon.journal import Chunk
from flexd.control.daemon.membership import Membership, Topology
from flexd.control.protocol.messages import (
    Bytes,
    ChunkHeader,
    ControlMessage,
    DaemonNotice,
    EpochAnnouncement,
    EpochEnd,
    EpochGo,
    EpochMessage,
    Fence,
    Heartbeat,
    Hello,
    HelloRefused,
    Listing,
    ListRequest,
    MalformedReportError,
    Progress,
    RowsAssembly,
    RowsPiece,
    Settled,
    TableList,
    decode,
    encode,
    pieces_of,
    rows_body,
)
from flexd.core.errors import ControlError, PlacementError, StaleMessageError, TopologyError, UnknownMessageError
from flexd.core.placement import Placement
from flexd.core.supervision import fault_point, is_power_of_two

REFUSED_KINDS = ("stale", "malformed", "identity", "unknown")
"""stale: of another attempt, generation, epoch or connection. malformed: no message that belongs here, or one whose
report is not in order. identity: of a rank that contradicts the daemon or its peers. unknown: of a kind that a newer
version may have; ignored."""

HEARTBEAT_SECONDS = 1.0
"""Time between two heartbeats to a rank; longer with very many ranks, shorter with a short timeout."""
# To all ranks together.
_HEARTBEATS_PER_SECOND = 1_000
_HEARTBEATS_PER_TIMEOUT = 4


class EpochFailedError(ControlError):
    """A message in order whose content ends the epoch."""


class RankDisconnected(NamedTuple):
    """The connection of a registration has ended."""

    hello: Hello
    reason: str


class RankChannels:
    """Sends, receives, checks and dispatches the messages of the ranks. Belongs to the coordinator's thread.

    Args:
        notice: the first message to each peer, with the instance that hellos have to name.
        timeout_seconds: shortest silence after which a rank gives the daemon up.
        members: registers the ranks whose hello is in order.
        on_event: called with (name, fields) of each log line.

    Attributes:
        server: the connections; set before the first use.
        refused: number of refused messages by kind, see ``REFUSED_KINDS``.
        malformed_reports: number of refused reports by the field that was not in order.
    """

    server: ChannelQueues

    def __init__(
        self,
        notice: DaemonNotice,
        timeout_seconds: float,
        members: Membership,
        on_event: Callable[..., None],
    ) -> None:
        self._instance = notice.instance
        self._notice = encode(notice)
        self._members = members
        self._event = on_event
        self.refused: Counter[str] = Counter()
        self.malformed_reports: Counter[str] = Counter()
        self._heartbeat = encode(Heartbeat())
        self._longest_heartbeat_seconds = timeout_seconds / _HEARTBEATS_PER_TIMEOUT
        self._next_heartbeat_at = 0.0
        # By peer: the newest hello that it sent and that was accepted.
        self._hello_of: dict[int, Hello] = {}
        # By session: the newest connection of each process.
        self._peer_of: dict[str, int] = {}

    def receive(self, limit: int, timeout_seconds: float) -> list[Received | RankDisconnected]:
        """Return what has arrived, at most ``limit``; waits until there is something or the timeout."""
        found: list[Received | RankDisconnected] = []
        for event in self.server.unread.receive(limit, timeout_seconds):
            if isinstance(event, Received):
                found.append(event)
            elif isinstance(event, Opened):
                self.server.send([event.peer], self._notice)
            elif isinstance(event, Closed):
                hello = self._hello_of.pop(event.peer, None)
                if hello is not None and self._peer_of.get(hello.session) == event.peer:
                    del self._peer_of[hello.session]
                    found.append(RankDisconnected(hello, event.reason))
        return found

    def _check_sender(self, peer: int, hello: Hello) -> None:
        """Raises StaleMessageError: the connection speaks for another rank, or the rank has a newer one."""
        known = self._hello_of.get(peer)
        if known is not None and (known.session, known.identity) != (hello.session, hello.identity):
            raise StaleMessageError(f"a hello of rank {hello.identity.rank} on another rank's connection")
        if self._peer_of.get(hello.session, peer) > peer:
            raise StaleMessageError(f"a hello of rank {hello.identity.rank} on a connection that it has given up")

    def _register(self, peer: int, hello: Hello) -> None:
        """Record an accepted hello of a peer; an older connection of the same process is closed."""
        before = self._peer_of.get(hello.session)
        if before is not None and before != peer:
            self._hello_of.pop(before, None)
            self.server.close(before, "replaced")
        self._hello_of[peer] = hello
        self._peer_of[hello.session] = peer

    def peers_of(self, topology: Topology) -> tuple[int, ...]:
        """Return the peer of each rank; -1 for one that has left."""
        return tuple(self._peer_of.get(hello.session, -1) for hello in topology.hellos)

    def send(self, peers: Sequence[int], message: ControlMessage, body: Bytes = b"") -> None:
        """Queue a message; never waits."""
        self.server.send(peers, encode(message), body)

    def close(self, hello: Hello, reason: str) -> None:
        """Close the connection of a registration, if it has one."""
        peer = self._peer_of.get(hello.session)
        if peer is not None:
            self.server.close(peer, reason)

    def send_heartbeats(self, now: float) -> None:
        """Send a heartbeat to all registered ranks when it is due."""
        if now < self._next_heartbeat_at:
            return
        wait = max(HEARTBEAT_SECONDS, len(self._hello_of) / _HEARTBEATS_PER_SECOND)
        self._next_heartbeat_at = now + min(wait, self._longest_heartbeat_seconds)
        self.server.send(list(self._hello_of), self._heartbeat)

    def dispatch(
        self,
        received: Received,
        now: float,
        epoch: Epoch | None = None,
        act: Callable[[Epoch, int, EpochMessage, Bytes], None] | None = None,
    ) -> None:
        """Check one message and pass those of the epoch to ``act``, with their rank. A bad one is only counted, and of
        one with a bad report the rest acts.

        Raises:
            EpochFailedError: the message is in order, but ends the epoch.
        """
        malformed: MalformedReportError | None = None
        try:
            try:
                message = decode(received.message)
            except MalformedReportError as error:
                message, malformed = error.rest, error
            if isinstance(message, Hello):
                self._receive_hello(received.peer, message, now)
            elif isinstance(message, TableList):
                self._members.tables.record_tables(message, received.body)
            elif isinstance(message, EpochMessage):
                if epoch is None or act is None:
                    raise StaleMessageError(f"a {message.kind} message outside of any epoch")
                rank = epoch.rank_of(message, received.peer)
                if malformed is not None:
                    self._refuse_report(rank, malformed)
                # A message that ``act`` refuses is no sign of life.
                act(epoch, rank, message, received.body)
                self._members.mark_heard(message.fence.attempt, rank, now)
            else:
                raise ControlError(f"a {message.kind} message from a rank")
        except EpochFailedError:
            raise
        except StaleMessageError:
            self._refuse("stale")
        except UnknownMessageError:
            self._refuse("unknown")
        except ControlError:
            self._refuse("malformed")

    def _receive_hello(self, peer: int, hello: Hello, now: float) -> None:
        if hello.instance != self._instance:
            raise StaleMessageError("a hello to another daemon")
        attempt, rank = hello.identity.attempt, hello.identity.rank
        self._check_sender(peer, hello)
        try:
            if self._members.accept(hello, now):
                fault_point("hello.accepted")
                self._event("rank_hello", attempt=attempt, rank=rank, version=hello.agreed.version)
        except TopologyError as error:
            self._refuse("identity")
            if not self._members.refusal_is_known:  # It registers again every two seconds.
                self._event("rank_refused", attempt=attempt, rank=rank, reason=str(error))
            self.send([peer], HelloRefused(hello.nonce, error.message[:2000], error.remedy))
        else:
            self._register(peer, hello)

    def _refuse(self, kind: str) -> None:
        self.refused[kind] += 1
        # Anyone who can connect can send invalid messages.
        if is_power_of_two(self.refused[kind]):
            self._event("message_refused", kind=kind, count=self.refused[kind])

    def _refuse_report(self, rank: int, error: MalformedReportError) -> None:
        self.refused["malformed"] += 1
        self.malformed_reports[error.field] += 1
        if is_power_of_two(self.malformed_reports[error.field]):
            self._event(
                "report_refused", rank=rank, field=error.field, reason=error.message,
                count=self.malformed_reports[error.field],
            )  # fmt: skip


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
        agreed, applied: the version that each rank has agreed on and applied.
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
        self.agreed = [0] * world
        self.applied = [0] * world
        self._settled: dict[int, Settled] = {}
        self._listings: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = {}
        self._assemblies: dict[int, RowsAssembly] = {}
        self._listing_ranks: tuple[int, ...] = ()
        fault_point("epoch.begin")
        report_seconds = max(REPORT_SECONDS, world / REPORTS_PER_SECOND)
        for peer, hello in zip(self.peers, topology.hellos, strict=True):
            channels.send([peer], EpochAnnouncement(fence, hello.nonce, report_seconds))
        fault_point("epoch.announced")

    def rank_of(self, message: EpochMessage, peer: int) -> int:
        """Return the rank that a message came from. Raises StaleMessageError: it is not of this epoch."""
        rank = self._rank_of.get(peer)
        if message.fence != self.fence or rank is None:
            raise StaleMessageError(f"a {message.kind} message of another attempt, generation or epoch")
        return rank

    def record_settled(self, rank: int, message: Settled) -> None:
        self._settled[rank] = message
        self.agreed[rank] = message.agreed.version
        self.applied[rank] = message.applied_version

    def record_progress(self, rank: int, message: Progress) -> None:
        self.agreed[rank] = max(self.agreed[rank], message.agreed_version)
        self.applied[rank] = max(self.applied[rank], message.applied_version)

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

    def advance(self, placement_is_known: Callable[[Epoch], bool], now: float) -> bool:
        """Enter the next phase if it is due; True if it is LIVE now. Raises ControlError if it takes too long."""
        if self.phase is EpochPhase.SETTLING and len(self._settled) == len(self.peers):
            self._join()
            if placement_is_known(self):
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
        delta, plan_id = chunk.delta, "" if chunk.migration is None else chunk.migration.plan_id
        first, *others = pieces_of(rows_body(delta.keys, delta.old_tiers, delta.new_tiers))
        fault_point("chunk.announce")
        self._channels.send(self.peers, ChunkHeader(self.fence, plan_id, chunk.version, len(delta)), first)
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
