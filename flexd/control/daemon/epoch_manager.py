"""Beginning, feeding and ending of epochs: the daemon's side of the protocol, in the coordinator's thread.

An epoch goes through::

    (none) --all ranks of an attempt registered--> SETTLING --all settled--> LIVE
                                                       `--placement unknown--> LISTING --all listed--> LIVE
    any phase --a rank registers again, is lost, refuses a chunk, or its connection ends--> (none)

Chunks are pushed in LIVE only: then every rank has settled, and all agreed versions are equal (see ``inbox``).
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from flexd.control.daemon.channel_events import Received
from flexd.control.daemon.epoch import REFUSED_KINDS, Epoch, EpochPhase, RankChannels, RankDisconnected
from flexd.control.daemon.journal import AgreedPlacement, PlacementJournal, Segment
from flexd.control.daemon.membership import Membership, RankPresence, RefusedRank, Topology
from flexd.control.daemon.pusher import ChunkLimits, ChunkPusher, Throttle
from flexd.control.daemon.tap_receiver import NO_TAP, TapReceiver
from flexd.control.protocol.handshake import CHANNEL_ERRORS, TlsFiles, new_token, reconnect_backoff
from flexd.control.protocol.messages import (
    Bytes,
    ChunkRefused,
    DaemonNotice,
    EpochMessage,
    Fence,
    Listing,
    Progress,
    RowsPiece,
    Settled,
    TapOffer,
    TapPiece,
    TapState,
)
from flexd.control.protocol.report import StepReport, TrainerSettings
from flexd.core.errors import ControlError, SnapshotError, first_line
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement, RankLayout
from flexd.core.secrets import Secret
from flexd.core.supervision import fault_point, is_power_of_two, log_event
from flexd.stream.tap_source import TapSource

logger = logging.getLogger(__name__)

OnReport = Callable[[int, StepReport], None]


@dataclass(frozen=True)
class ControlOptions:
    """Options of the coordinator.

    Attributes:
        listen_port: 0 binds a free port (see ``Coordinator.port``).
        secret: the shared secret, or its file (read again when it changes); None on loopback only.
        timeout_seconds: deadline of every wait on the channel, and the silence after which a rank is lost.
        tls: certificates of the daemon; ranks then need certificates of the same authority.
        tick_seconds: longest time between two ticks while ranks are registered.
        max_ranks: of a job; also the largest number of connections that have proven themselves.
        takes_tables: the tables are those of the ranks, not of the configuration: ranks that have others may propose
            theirs (``Coordinator.proposed_tables``).
    """

    job: str
    listen_host: str = "127.0.0.1"
    listen_port: int = 29_400
    secret: Secret = None
    tls: TlsFiles | None = None
    timeout_seconds: float = 15.0
    chunks: ChunkLimits = field(default_factory=ChunkLimits)
    tick_seconds: float = 0.02
    max_ranks: int = 4096
    takes_tables: bool = False


@dataclass(frozen=True)
class LiveTopology:
    """The ranks as they are now.

    Attributes:
        generation: counts the changes of the set of rank processes; a plan names the one it was made for.
        replica_slots: slots that every rank has (the minimum over ranks), for each dim-group.
        ready: whether chunks can be pushed.
        reason: why no chunk can be pushed; empty if ``ready``.
        trainer: how the trainer constructed its collections; None if it does not say.
        copies_memory_bytes: memory for copies that every rank has; None if none says.
    """

    generation: int
    attempt: str
    layout: RankLayout
    replica_slots: tuple[int, ...]
    ready: bool
    reason: str
    trainer: TrainerSettings | None = None
    copies_memory_bytes: int | None = None


@dataclass(frozen=True)
class ControlStatus:
    """The channel at one moment, for users and metrics. Counters are since the start.

    Attributes:
        presence: registered ranks of the newest attempt, or, when none is, all of the last complete attempt as missing.
        reason: what the coordinator waits for; empty when all ranks are live.
        attempts_waiting: attempts that are refused because another one holds the job.
        refused_ranks: ranks that were refused lately, newest first, with the reason.
        refused_messages: number by kind, see ``epoch.REFUSED_KINDS``.
        malformed_reports: number of refused step reports by the field that was not in order.
        illegal_transitions: transitions of migrations that their state table refused: a fault of flexd.
    """

    epochs: int
    generation: int
    presence: RankPresence
    reason: str
    attempts_waiting: int = 0
    refused_ranks: tuple[RefusedRank, ...] = ()
    refused_messages: Mapping[str, int] = field(default_factory=dict)
    malformed_reports: Mapping[str, int] = field(default_factory=dict)
    refused_chunks: int = 0
    digest_mismatches: int = 0
    illegal_transitions: int = 0


class EpochManager:
    """Base of ``Coordinator``, which states its arguments. ``live``, ``placement`` and ``status`` are thread-safe, any
    thread may read the attributes, and the rest belongs to the coordinator's thread.

    Attributes:
        journal: makes the placement durable; thread-safe.
        channels: the connections of the ranks.
        agreed: the placement that all ranks have agreed on.
        members: the registered ranks, and the attempt that holds the job; thread-safe.
        reason: why nothing is pushed; empty while the ranks are ready.
        divergence: why pushing is paused although nobody has paused it: ranks report another placement than the daemon
            has recorded, again after it was read from them; empty otherwise.
        priced_exchange: with which trainers that choose it themselves begin when they join the next epoch; empty before
            a plan was made.
    """

    def __init__(
        self,
        options: ControlOptions,
        keyspace: KeySpace,
        journal: PlacementJournal,
        on_report: OnReport,
        on_event: Callable[[str, Mapping[str, object]], None],
        tap: TapSource | None,
        throttle: Throttle | None,
    ) -> None:
        self._options = options
        self._keyspace = keyspace
        self.journal = journal
        self._stopping = threading.Event()
        self._on_report = on_report
        self._on_event = on_event
        self.members = Membership(
            options.job, keyspace, silent_seconds=options.timeout_seconds, max_ranks=options.max_ranks,
            takes_tables=options.takes_tables,
        )  # fmt: skip
        notice = DaemonNotice(options.job, new_token(), keyspace.digest)
        self.channels = RankChannels(notice, options.timeout_seconds, self.members, self._emit)
        self._tap = None if tap is None else TapReceiver(self.channels, tap, self._emit)
        self._received: deque[Received | RankDisconnected] = deque()
        self._backoff = reconnect_backoff()
        self._counters: Counter[str] = Counter()
        self._epochs = 0
        self._last_end = ""
        # Reason and ranks of the epoch that ended last.
        self._last_topology: Topology | None = None
        self._next_epoch_at = 0.0
        segment = journal.segment
        # The attempt that held the job under an earlier daemon.
        self._earlier_attempt = segment.attempt if segment else ""
        self._generation = segment.generation if segment else 0
        self._topology_identity = segment.topology if segment else ""
        # Version that all ranks have applied.
        self._applied = 0
        self.pusher = ChunkPusher(journal, keyspace, options.chunks, throttle)
        self.agreed = AgreedPlacement(journal)
        self.epoch: Epoch | None = None
        self._live: LiveTopology | None = None
        self.reason = "no rank has registered"
        self.divergence = ""
        self.priced_exchange = ""
        # The next epoch starts from the lists of the ranks, not from the journal.
        self._must_list = False
        # Epochs of this topology generation in which a placement differed, since ``trust_again``.
        self._divergences = 0

    @property
    def has_no_ranks(self) -> bool:
        """True if no rank has registered, or all have left."""
        return self.epoch is None and not self.members.present().attempt

    def live(self) -> LiveTopology | None:
        """Return the registered ranks; None until all ranks of an attempt have registered."""
        return self._live

    def placement(self) -> Placement:
        """Return what all ranks have agreed on; before any rank is live, the newest placement in the journal."""
        return self.agreed.placement

    def status(self) -> ControlStatus:
        """Return the state of the channel at this moment."""
        live, presence = self._live, self.members.present()
        ready = live is not None and live.ready
        if ready:
            presence = presence._replace(missing=())
        elif not presence.attempt and live is not None:
            presence = presence._replace(missing=tuple(range(live.layout.world_size)))
        return ControlStatus(
            epochs=self._epochs,
            generation=self._generation,
            presence=presence,
            reason="" if ready else self.reason,
            attempts_waiting=self.members.waiting(),
            refused_ranks=self.members.refused(),
            refused_messages={kind: self.channels.refused[kind] for kind in REFUSED_KINDS},
            malformed_reports=dict(self.channels.malformed_reports),
            refused_chunks=self._counters["chunks_refused"],
            digest_mismatches=self._counters["digest_mismatches"],
            illegal_transitions=self.pusher.illegal_transitions,
        )

    def _emit(self, name: str, **fields: object) -> None:
        log_event(logger, logging.INFO, f"control channel: {name}", fields)
        try:
            self._on_event(name, fields)
        except Exception:
            logger.exception("control channel: the event callback failed")

    def receive(self, received: Iterable[Received | RankDisconnected]) -> None:
        """Keep what has arrived for the next ``tick``."""
        self._received.extend(received)

    def tick(self, now: float) -> None:
        """Process what has arrived and do what is due. Raises channel errors, which end the epoch; what has arrived
        after the message that ended it is processed in the next tick."""
        while self._received:
            event = self._received.popleft()
            if isinstance(event, Received):
                self.channels.dispatch(event, now, self.epoch, self._act)
            elif self.members.mark_disconnected(event.hello, now):
                me = event.hello.identity
                self._emit("rank_disconnected", attempt=me.attempt, rank=me.rank, reason=event.reason)
        for hello in self.members.expire(now):
            self.channels.close(hello, "silent")
            self._emit("rank_lost", attempt=hello.identity.attempt, rank=hello.identity.rank)
        self.channels.send_heartbeats(now)
        topology = self.members.complete()
        epoch = self.epoch
        if epoch is not None and (topology is None or topology.nonces != epoch.topology.nonces):
            # Chunks on their way that no rank has applied: the next epoch may end the same way.
            self.end(
                _difference(epoch.topology, topology, self.members.present()), failed=bool(self.pusher.outstanding)
            )
            epoch = None
        if topology is None:
            self._not_ready(self._incomplete_reason())
        if epoch is None:
            self.pusher.end_early()
            if topology is not None and now >= self._next_epoch_at:
                self._begin_epoch(topology)
        elif epoch.phase is EpochPhase.LIVE:
            self._push(epoch)
            if self._tap is not None:
                self._tap.tick()
        elif epoch.advance(self._continue_from, now):
            self._go_live(epoch)

    def trust_again(self) -> None:
        """End a pause because of ``divergence``; the next difference is healed as the first one. Any thread."""
        self.divergence = ""
        self._divergences = 0

    def _continue_from(self, epoch: Epoch) -> bool:
        if self._must_list:
            return False
        return self.agreed.continue_from(epoch.version, epoch.digest, self._segment(epoch.topology))

    def _act(self, epoch: Epoch, rank: int, message: EpochMessage, body: Bytes) -> None:
        if isinstance(message, Settled):
            epoch.record_settled(rank, message)
        elif isinstance(message, Listing):
            epoch.record_listing(rank, message, body)
        elif isinstance(message, RowsPiece):
            epoch.record_listed_rows(rank, body)
        elif isinstance(message, ChunkRefused):
            self._counters["chunks_refused"] += 1
            self._emit("chunk_refused", rank=rank, version=message.version, reason=message.reason)
            self.pusher.fail_active(f"rank {rank} refused chunk {message.version}: {message.reason}")
            self.end(f"rank {rank} refused chunk {message.version}")
        elif isinstance(message, Progress):
            epoch.record_progress(rank, message)
            if message.report is not None:
                self._receive_report(epoch, rank, message.report)
        elif isinstance(message, TapOffer) and self._tap is None:
            self.channels.send([epoch.peers[rank]], TapState(epoch.fence, 0, 0, message.number, NO_TAP))
        elif isinstance(message, TapOffer) and self._tap is not None:
            self._tap.record_offer(rank, message)
        elif isinstance(message, TapPiece) and self._tap is not None:
            self._tap.record_piece(rank, message, body)
        else:
            raise ControlError(f"a {message.kind} message from a rank")

    def _receive_report(self, epoch: Epoch, rank: int, report: StepReport) -> None:
        # Before an epoch is live, the recorded digests are those of versions that it may give out again.
        expected = self.pusher.digests.get(report.placement.version) if epoch.phase is EpochPhase.LIVE else None
        if expected is not None and expected != report.placement.digest:
            self._counters["digest_mismatches"] += 1
            self._note_divergence(rank, report.placement.version)
        try:
            self._on_report(rank, report)
        except Exception:
            self._counters["failed_reports"] += 1
            if is_power_of_two(self._counters["failed_reports"]):
                logger.exception(
                    "control channel: a report of rank %d cannot be processed (%d times)",
                    rank, self._counters["failed_reports"],
                )  # fmt: skip

    def _note_divergence(self, rank: int, version: int) -> None:
        """Heal a placement that differs: end the epoch and start from the lists of the ranks; pause after a repeat."""
        if self.divergence:
            return
        message = f"rank {rank} reports another placement at version {version} than the daemon has recorded"
        self._divergences += 1
        self._emit("placement_digest_mismatch", rank=rank, version=version, times=self._divergences)
        if self._divergences == 1:
            self._must_list = True
        else:
            message += ", again after the daemon has read the ranks' placement"
            self.divergence = message
            self.pusher.paused = True
            self._emit("pushing_paused", reason=message)
        # Its chunks start from a placement that the ranks may not have.
        self.pusher.fail_active(message)
        if self._divergences == 1:
            self.end(message)

    def _begin_epoch(self, topology: Topology) -> None:
        if topology.identity != self._topology_identity:
            self._divergences = 0
            self._topology_identity = topology.identity
            self._generation += 1
            self.pusher.new_generation(f"the ranks changed: topology generation is {self._generation} now")
        if self._last_topology is not None and self._last_topology.identity == topology.identity:
            # A rank that lost its connection has a new nonce, whatever ended the epoch first.
            again = _difference(self._last_topology, topology, self.members.present())
            if again and again != self._last_end:
                self._last_end = f"{self._last_end}; {again}"
        self._epochs += 1
        fence = Fence(self._options.job, topology.attempt, self._generation, self._epochs, new_token())
        self.epoch = Epoch(
            self.channels, topology, fence, self._options.timeout_seconds, self._keyspace.total_rows,
            self.priced_exchange,
        )  # fmt: skip
        if self._tap is not None:
            self._tap.begin_epoch(fence, topology, self.epoch.peers)
        self.reason = "the ranks are settling"
        self._publish_live(topology, ready=False)

    def _segment(self, topology: Topology) -> Segment:
        return Segment(topology.attempt, self._generation, self._topology_identity)

    def _go_live(self, epoch: Epoch) -> None:
        if epoch.listed_placement is not None:
            self.agreed.restart_from(epoch.listed_placement, self._segment(epoch.topology))
            self._emit("placement_listed", version=epoch.version, rows=len(epoch.listed_placement))
            self._must_list = False
        self.pusher.begin_epoch(epoch.version, epoch.digest, epoch.topology, self._last_end)
        fault_point("epoch.live")
        self.reason = ""
        self._publish_live(epoch.topology, ready=True)
        self._emit(
            "epoch_live", epoch=epoch.fence.epoch, generation=self._generation, attempt=epoch.topology.attempt,
            version=epoch.version,
        )  # fmt: skip

    def _push(self, epoch: Epoch) -> None:
        agreed, applied = min(epoch.agreed), min(epoch.applied)
        self.pusher.acknowledge(agreed, applied)
        if applied > self._applied:
            self._backoff.reset()
        self._applied = applied
        try:
            self.agreed.advance(agreed)
        except SnapshotError as error:
            self._emit("journal_not_compacted", reason=str(error))
        while not self._stopping.is_set():
            chunk = self.pusher.next_chunk(self._generation)
            if chunk is None:
                return
            epoch.push(chunk)

    def end(self, reason: str, failed: bool = True) -> None:
        """End the epoch on all ranks. The next one begins after a wait that grows with repeated failure.

        The wait is short again once all ranks have applied a chunk.
        """
        epoch, self.epoch = self.epoch, None
        self.reason = reason
        if failed:
            self._next_epoch_at = time.monotonic() + self._backoff.seconds()
        if epoch is None:
            return
        self._last_end, self._last_topology = reason, epoch.topology
        if self._tap is not None:
            self._tap.end_epoch()
        self._not_ready(reason)
        self._emit("epoch_ended", epoch=epoch.fence.epoch, reason=reason)
        try:
            epoch.close()
        except CHANNEL_ERRORS as error:
            logger.error(
                "control channel: the end of epoch %d cannot be sent: %s", epoch.fence.epoch, first_line(error)
            )

    def _incomplete_reason(self) -> str:
        attempt, present, expected, _ = self.members.present()
        refused = self.members.refused()
        reason = (
            f"{present} of {expected} ranks of attempt {attempt!r} are here" if attempt else "no rank is registered"
        )
        if not refused:
            return reason
        more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        return f"{reason}; {refused[0]}{more}"

    def _not_ready(self, reason: str) -> None:
        self.reason = reason
        live = self._live
        if live is not None and (live.ready or live.reason != reason):
            self._live = replace(live, ready=False, reason=reason)

    def _publish_live(self, topology: Topology, ready: bool) -> None:
        self._live = LiveTopology(
            self._generation, topology.attempt, topology.layout, topology.replica_slots, ready, self.reason,
            topology.trainer, topology.copies_memory_bytes,
        )  # fmt: skip


def _difference(before: Topology, after: Topology | None, present: RankPresence) -> str:
    """Return in words what has changed since the ranks of an epoch were ``before``; empty if nothing."""
    if after is None:
        if present.attempt != before.attempt:
            return f"all ranks of attempt {before.attempt!r} have left"
        return f"{_ranks(present.missing)} left" if present.missing else ""
    if after.attempt != before.attempt:
        return f"attempt {after.attempt!r} has replaced attempt {before.attempt!r}"
    pairs = zip(before.nonces, after.nonces, strict=False)
    again = tuple(rank for rank, (old, new) in enumerate(pairs) if old != new)
    return f"{_ranks(again)} registered again" if again else ""


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more}"
