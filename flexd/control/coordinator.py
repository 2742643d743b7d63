"""The daemon's side of the control channel: registers the ranks, opens epochs, pushes migrations, hears reports.

One thread does it all, a tick at a time; every wait in a tick has a deadline. The address is taken at once, and the
thread then loads torch and hosts the store: ranks that connect meanwhile wait in the socket's queue. An epoch goes
through::

    (none) --all ranks of an attempt are here--> SETTLING --all settled, group joined--> LIVE
                                                            `--placement unknown--> LISTING --all listed--> LIVE
    any phase --a rank says hello anew, is lost, refuses a chunk, or the group fails--> (none)

Chunks are pushed in LIVE only: then every rank has settled, and all agreed versions are equal (see ``inbox``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from flexd.control.agreement import AgreedPlacement
from flexd.control.board import Board
from flexd.control.channel import CHANNEL_ERRORS, Backoff, first_line, listen, load_transports, new_token
from flexd.control.epoch import Epoch, FromRank, Phase
from flexd.control.intake import DeltaIntake
from flexd.control.journal import JournalledMigration, PlacementJournal, Segment
from flexd.control.live import ControlOptions, ControlStatus, LiveTopology
from flexd.control.membership import Attendance, Membership, Topology
from flexd.control.messages import ChunkRefused, DaemonNotice, Listing, Progress, Settled, Signer, TapOffer
from flexd.control.migration import ChunkSource, Migration, MigrationAbout
from flexd.control.news import NewsTeller, OnMigration
from flexd.control.pusher import ChunkPusher
from flexd.control.reception import REFUSED_KINDS, Reception
from flexd.control.report import StepReport
from flexd.control.throttle import Throttle
from flexd.errors import ControlError, SnapshotError
from flexd.faults import fault_point
from flexd.keyspace import KeySpace
from flexd.placement import Delta, Placement
from flexd.planner.delta import moved_bytes
from flexd.stream.tap import TapSource

logger = logging.getLogger(__name__)

OnReport = Callable[[int, StepReport], None]
OnEvent = Callable[[str, Mapping[str, object]], None]

_MESSAGES_PER_TICK = 4096
_ALONE_SECONDS = 0.1
"""Between looks at the queue while no rank is here: a daemon that waits for a training should cost nothing."""
_DEPOSED = "this daemon leads no more"

__all__ = ["ControlOptions", "ControlStatus", "Coordinator", "LiveTopology"]


class Coordinator:
    """Hosts the control channel. All methods are thread-safe.

    Args:
        journal: where the placement is durable; the caller closes it after ``stop``.
        on_report: called with (rank, report) for every step report.
        on_event: called with (name, fields) for everything worth a log line or a metric.
        on_migration: called with every transition of a migration, and when its figures are final.
            All run in the coordinator's thread and must not block; what they raise is logged.
        tap: takes what the ranks have counted themselves, if the stream comes that way.
        throttle: how much of a migration may be on its way; without one nothing is held back.
        may_act: asked before every tick and every push, any thread: whether this daemon still leads.
    """

    def __init__(
        self,
        options: ControlOptions,
        keyspace: KeySpace,
        journal: PlacementJournal,
        on_report: OnReport | None = None,
        on_event: OnEvent | None = None,
        tap: TapSource | None = None,
        throttle: Throttle | None = None,
        on_migration: OnMigration | None = None,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        self._tap = tap
        self._may_act = may_act
        self._intake: DeltaIntake | None = None
        self._options = options
        self._keyspace = keyspace
        self._journal = journal
        self._on_report = on_report
        self._on_event = on_event
        self._signer = Signer(options.secret)
        self._instance = new_token()
        self._members = Membership(
            options.job, keyspace.digest, len(keyspace.groups), silent_seconds=options.timeout_seconds
        )
        self._reception = Reception(options.job, self._instance, self._signer, self._members, self._event)
        self._pusher = ChunkPusher(journal, options.window_chunks, options.max_chunk_rows, throttle, self._row_bytes)
        self._news = NewsTeller(self._event, on_migration)
        self._backoff = Backoff()
        self._counters: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._board: Board | None = None
        self._port = 0
        self._listen_fd: int | None = None
        self._failure = ""
        self._epoch: Epoch | None = None
        self._epochs = 0
        self._next_epoch_at = 0.0
        segment = journal.segment
        self._generation = segment.generation if segment else 0
        self._topology_identity = segment.topology if segment else ""
        self._live: LiveTopology | None = None
        self._reason = "no rank has registered"
        self._applied = 0
        self._agreed = AgreedPlacement(journal)
        self._present = Attendance()
        self._thread = threading.Thread(target=self._run, name="flexd-coordinator", daemon=True)

    def listen(self) -> None:
        """Takes the address; ranks that connect wait until ``start``. Raises ControlError if that cannot be."""
        if self._listen_fd is None:
            self._listen_fd, self._port = listen(self._options.listen_host, self._options.listen_port)

    def start(self) -> None:
        """Returns at once; the thread hosts the store. Raises ControlError if the address cannot be listened on."""
        self.listen()
        self._reason = "the control channel is not up yet"
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Ends the epoch and the thread; False if it did not end within the deadline. Open migrations fail."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        else:
            self._close_listener()
        return not self._thread.is_alive()

    @property
    def failure(self) -> str:
        """Why there is no control channel and will be none; empty while there is one or it may come."""
        return self._failure

    @property
    def port(self) -> int:
        """Where it listens; 0 before ``listen``."""
        return self._port

    def live(self) -> LiveTopology | None:
        """None until all ranks of an attempt have registered."""
        return self._live

    def placement(self) -> Placement:
        """What all ranks have agreed on. Before any rank is live: the newest placement in the journal."""
        return self._agreed.placement

    def migrate(
        self,
        plan_id: str,
        chunks: ChunkSource,
        on_progress: Callable[[Migration], None] | None = None,
        generation: int | None = None,
        about: MigrationAbout | None = None,
    ) -> Migration:
        """Starts pushing as soon as the ranks are live; supersedes the migration before it at its next chunk.

        Args:
            chunks: deltas, in order, each from the placement that the one before leaves; or a function that makes
                them from the placement at which this migration starts (an older one may still change it until then).
            on_progress: called in the coordinator's thread after every change; must not block.
            generation: fail if the ranks are of another topology generation by then.
            about: recorded with it; by default its plan's id is its own.
        """
        migration = Migration(plan_id, chunks, generation, on_progress, about)
        if self._stopping.is_set() or self._failure:
            raise ControlError(self._failure or "the coordinator is stopping", remedy="start the daemon again")
        self._pusher.submit(migration)
        return migration

    def current_migration(self) -> Migration | None:
        """The one that is running, or else waiting."""
        return self._pusher.current

    def newest_migration(self) -> JournalledMigration | None:
        """Of the newest chunk in the journal, which an earlier daemon may have pushed; None if that is not known."""
        return self._journal.newest_migration

    def placement_at(self, version: int) -> Placement:
        """Of an earlier version. Raises SnapshotError if the journal does not reach back to it."""
        return self._journal.placement_at(version)

    @property
    def outstanding_chunks(self) -> int:
        """Pushed, and not yet applied by every rank."""
        return self._pusher.outstanding_chunks

    def _row_bytes(self, delta: Delta) -> npt.NDArray[np.int64]:
        live = self._live
        if live is None:
            raise ControlError("no rank is registered")
        return moved_bytes(delta, self._keyspace, live.layout)

    def pause(self) -> None:
        """Pushes no further chunk until ``resume``; what is pushed is applied."""
        self._pusher.paused = True

    def resume(self) -> None:
        self._pusher.paused = False

    def status(self) -> ControlStatus:
        live, epoch = self._live, self._epoch
        attempt, present, expected, missing = self._present
        ready = live is not None and live.ready
        if not attempt and live is not None:
            missing = tuple(range(live.layout.world_size))
        return ControlStatus(
            epoch=epoch.number if epoch else 0,
            epochs=self._epochs,
            generation=self._generation,
            attempt=attempt,
            ranks=expected,
            ranks_ready=present,
            agreed_version=self._agreed.version,
            applied_version=self._applied,
            paused=self._pusher.paused,
            refused_messages={kind: self._refused_count(kind) for kind in REFUSED_KINDS},
            refused_chunks=self._counters["chunks_refused"],
            digest_mismatches=self._counters["digest_mismatches"],
            reason="" if ready else self._reason,
            illegal_transitions=self._pusher.illegal_transitions,
            missing_ranks=() if ready else missing,
        )

    def _host(self) -> None:
        load_transports()
        listen_fd, self._listen_fd = self._listen_fd, None
        assert listen_fd is not None  # noqa: S101
        options = self._options
        self._board = Board(
            options.listen_host, self._port, listen_fd, options.job, self._signer, options.timeout_seconds
        )
        self._intake = DeltaIntake(self._board, self._tap, on_urgent=lambda: self._event("tap_urgent"))
        self._board.publish(DaemonNotice(options.job, self._instance, self._keyspace.digest, options.term))
        self._reason = "no rank has registered"
        self._event("hosting", port=self._port)
        if self._journal.truncated_bytes:
            self._event("journal_truncated", bytes=self._journal.truncated_bytes)

    def _close_listener(self) -> None:
        listen_fd, self._listen_fd = self._listen_fd, None
        if listen_fd is not None:
            os.close(listen_fd)

    def _run(self) -> None:
        try:
            self._host()
        except Exception as error:
            self._close_listener()
            logger.exception("control channel: it cannot be hosted")
            self._failure = self._reason = f"the control channel cannot be hosted: {first_line(error)}"
        else:
            self._tick_until_stopped()
        ending = self._failure or "the daemon is stopping"
        self._pusher.stop(ending)
        self._end_epoch(ending)
        self._tell_progress()
        # Closes the listening socket: a daemon started next can have the port.
        self._board = self._intake = None

    def _tick_until_stopped(self) -> None:
        last = time.monotonic()
        while not self._stopping.wait(self._pause_seconds()):
            now = time.monotonic()
            # Stopped or starved for a while: the ranks' silence was ours.
            self._members.forgive(now - last - 1.0 if now - last > 1.0 else 0.0)
            last = now
            try:
                if self._may_act():
                    self._tick(now)
                else:
                    self._end_epoch(_DEPOSED, failed=False)
            except CHANNEL_ERRORS as error:
                self._end_epoch(first_line(error))
            except Exception as error:
                # The thread must outlive every surprise; the next epoch starts clean.
                logger.exception("control channel: unexpected error")
                self._end_epoch(first_line(error))
            self._tell_progress()

    def _pause_seconds(self) -> float:
        nobody = self._epoch is None and not self._present.attempt
        return max(self._options.tick_seconds, _ALONE_SECONDS if nobody else 0.0)

    @property
    def _hosting(self) -> Board:
        if self._board is None:
            raise ControlError("the coordinator is not started")
        return self._board

    @property
    def _taking_in(self) -> DeltaIntake:
        if self._intake is None:
            raise ControlError("the coordinator is not started")
        return self._intake

    def _tick(self, now: float) -> None:
        for data in self._hosting.messages(_MESSAGES_PER_TICK):
            self._reception.take(data, now, self._hosting, self._epoch, self._act)
        for hello in self._members.expire(now):
            self._event("rank_lost", attempt=hello.attempt, rank=hello.rank)
        topology = self._members.complete()
        self._present = self._members.present()
        epoch = self._epoch
        if epoch is not None and (topology is None or topology.nonces != epoch.topology.nonces):
            self._end_epoch("a rank has left or registered anew", failed=False)
            epoch = None
        if topology is None:
            attempt, present, expected, _ = self._present
            self._not_ready(
                f"{present} of {expected} ranks of attempt {attempt!r} are here" if attempt else "no rank is registered"
            )
        if epoch is None:
            self._pusher.end_early()
            if topology is not None and now >= self._next_epoch_at:
                self._begin_epoch(topology)
        elif epoch.phase is Phase.LIVE:
            self._push(epoch)
            self._taking_in.tick()
        elif epoch.advance(partial(self._agreed.continue_from, segment=self._segment(epoch.topology)), now):
            self._go_live(epoch)

    def _act(self, epoch: Epoch, message: FromRank) -> None:
        if isinstance(message, Settled):
            epoch.settled(message)
        elif isinstance(message, Listing):
            epoch.listed(message)
        elif isinstance(message, ChunkRefused):
            self._counters["chunks_refused"] += 1
            self._event("chunk_refused", rank=message.rank, version=message.version, reason=message.reason)
            self._pusher.fail_active(f"rank {message.rank} refused chunk {message.version}: {message.reason}")
            self._end_epoch(f"rank {message.rank} refused chunk {message.version}", failed=False)
        elif isinstance(message, Progress):
            epoch.progressed(message)
            if message.report is not None:
                self._take_report(message.rank, message.report)
        elif isinstance(message, TapOffer):
            self._taking_in.offered(message)

    def _take_report(self, rank: int, report: StepReport) -> None:
        expected = self._pusher.digest_at(report.placement_version)
        if expected is not None and expected != report.placement_digest:
            self._counters["digest_mismatches"] += 1
            self._event("placement_digest_mismatch", rank=rank, version=report.placement_version)
        if self._on_report is not None:
            try:
                self._on_report(rank, report)
            except Exception:
                logger.exception("control channel: the report callback failed")

    def _begin_epoch(self, topology: Topology) -> None:
        if topology.identity != self._topology_identity:
            self._topology_identity = topology.identity
            self._generation += 1
            self._pusher.new_generation(f"the ranks changed: topology generation is {self._generation} now")
        self._epochs += 1
        self._epoch = Epoch(
            self._hosting, topology, self._options.job, self._instance, self._generation, self._epochs,
            self._options.timeout_seconds, self._keyspace.total_rows, self._options.term,
        )  # fmt: skip
        self._taking_in.begin_epoch(self._epoch.fence, topology)
        self._reason = "the ranks are settling"
        self._publish_live(topology, ready=False)

    def _segment(self, topology: Topology) -> Segment:
        return Segment(topology.attempt, self._generation, self._topology_identity)

    def _go_live(self, epoch: Epoch) -> None:
        if epoch.listed_placement is not None:
            self._agreed.adopt(epoch.listed_placement, self._segment(epoch.topology))
            self._event("placement_listed", version=epoch.version, rows=len(epoch.listed_placement))
        self._pusher.begin_epoch(epoch.version, epoch.digest)
        fault_point("epoch.live")
        self._reason = ""
        self._backoff.reset()
        self._publish_live(epoch.topology, ready=True)
        self._event(
            "epoch_live", epoch=epoch.number, generation=self._generation, attempt=epoch.topology.attempt,
            version=epoch.version,
        )  # fmt: skip

    def _push(self, epoch: Epoch) -> None:
        agreed, applied = epoch.agreed_by_all, epoch.applied_by_all
        self._pusher.acknowledge(agreed, applied)
        self._applied = applied
        try:
            self._agreed.advance(agreed)
        except SnapshotError as error:
            self._event("journal_not_compacted", reason=str(error))
        while not self._stopping.is_set():
            chunk = self._pusher.next_chunk(self._generation)
            if chunk is None:
                return
            # Making a chunk takes time, and the process may have been stopped in it.
            if not self._may_act():
                raise ControlError(_DEPOSED)
            epoch.push(chunk)

    def _end_epoch(self, reason: str, failed: bool = True) -> None:
        """Everyone drops the group; the next epoch begins after a wait that grows with repeated failure."""
        epoch, self._epoch = self._epoch, None
        self._reason = reason
        if failed:
            self._next_epoch_at = time.monotonic() + self._backoff.seconds()
        if epoch is None:
            return
        self._taking_in.end_epoch()
        self._not_ready(reason)
        self._event("epoch_ended", epoch=epoch.number, reason=reason)
        try:
            epoch.close()
        except CHANNEL_ERRORS as error:
            logger.error("control channel: the store does not answer: %s", first_line(error))

    def _not_ready(self, reason: str) -> None:
        self._reason = reason
        live = self._live
        if live is not None and (live.ready or live.reason != reason):
            self._live = LiveTopology(
                live.generation, live.attempt, live.layout, live.replica_slots, ready=False, reason=reason
            )

    def _publish_live(self, topology: Topology, ready: bool) -> None:
        self._live = LiveTopology(
            self._generation, topology.attempt, topology.layout, topology.replica_slots, ready, self._reason
        )

    def _tell_progress(self) -> None:
        self._news.tell(self._pusher.take_news(), self._pusher.current)

    def _refused_count(self, kind: str) -> int:
        return self._reception.refused[kind] + (0 if self._intake is None else self._intake.refused[kind])

    def _event(self, name: str, **fields: object) -> None:
        logger.info("control channel: %s %s", name, fields)
        if self._on_event is not None:
            try:
                self._on_event(name, fields)
            except Exception:
                logger.exception("control channel: the event callback failed")
