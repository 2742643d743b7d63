"""The daemon's side of the control channel: registers the ranks, opens epochs, pushes migrations, hears reports.

One thread does it all, a tick at a time; every wait in a tick has a deadline. The address is taken at once, and the
thread then loads torch and hosts the store: ranks that connect meanwhile wait in the socket's queue.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from flexd.control.daemon.control_store import ControlStore
from flexd.control.daemon.coordinator_types import ControlOptions, ControlStatus, LiveTopology
from flexd.control.daemon.epoch_manager import DEPOSED, EpochManager, Hosted, OnEvent, OnReport
from flexd.control.daemon.journal import JournalledMigration, PlacementJournal
from flexd.control.daemon.migration import ChunkSource, Migration, MigrationMetadata
from flexd.control.daemon.migration_events import MigrationEventDispatcher, OnMigration
from flexd.control.daemon.tap_receiver import TapReceiver
from flexd.control.daemon.throttle import Throttle
from flexd.control.protocol.messages import DaemonNotice, Signer
from flexd.control.protocol.network import CHANNEL_ERRORS, first_line, listen, new_token
from flexd.control.protocol.store_client import load_transports
from flexd.core.errors import ControlError
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement
from flexd.stream.tap_source import TapSource

logger = logging.getLogger(__name__)

_ALONE_SECONDS = 0.1
"""Between looks at the queue while no rank is here: a daemon that waits for a training should cost nothing."""

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
        self._options = options
        self._keyspace = keyspace
        self._journal = journal
        self._signer = Signer(options.secret)
        self._instance = new_token()
        self._stopping = threading.Event()
        self._keeper = EpochManager(
            options, keyspace, journal, self._signer, self._instance, self._stopping, on_report, on_event, throttle,
            may_act,
        )  # fmt: skip
        self._pusher = self._keeper.pusher
        self._news = MigrationEventDispatcher(self._keeper.event, on_migration)
        self._port = 0
        self._listen_fd: int | None = None
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="flexd-coordinator", daemon=True)

    def listen(self) -> None:
        """Takes the address; ranks that connect wait until ``start``. Raises ControlError if that cannot be."""
        if self._listen_fd is None:
            self._listen_fd, self._port = listen(self._options.listen_host, self._options.listen_port)

    def start(self) -> None:
        """Returns at once; the thread hosts the store. Raises ControlError if the address cannot be listened on."""
        self.listen()
        self._keeper.reason = "the control channel is not up yet"
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
        return self._keeper.live

    def placement(self) -> Placement:
        """What all ranks have agreed on. Before any rank is live: the newest placement in the journal."""
        return self._keeper.agreed.placement

    def migrate(
        self,
        plan_id: str,
        chunks: ChunkSource,
        on_progress: Callable[[Migration], None] | None = None,
        generation: int | None = None,
        metadata: MigrationMetadata | None = None,
    ) -> Migration:
        """Starts pushing as soon as the ranks are live; supersedes the migration before it at its next chunk.

        Args:
            chunks: deltas, in order, each from the placement that the one before leaves; or a function that makes
                them from the placement at which this migration starts (an older one may still change it until then).
            on_progress: called in the coordinator's thread after every change; must not block.
            generation: fail if the ranks are of another topology generation by then.
            metadata: recorded with it; by default its plan's id is its own.
        """
        migration = Migration(plan_id, chunks, generation, on_progress, metadata)
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

    def pause(self) -> None:
        """Pushes no further chunk until ``resume``; what is pushed is applied."""
        self._pusher.paused = True

    def resume(self) -> None:
        self._pusher.paused = False

    def status(self) -> ControlStatus:
        return self._keeper.status()

    def _host(self) -> None:
        load_transports()
        listen_fd, self._listen_fd = self._listen_fd, None
        assert listen_fd is not None  # noqa: S101
        options = self._options
        store = ControlStore(
            options.listen_host, self._port, listen_fd, options.job, self._signer, options.timeout_seconds
        )
        intake = TapReceiver(store, self._tap, on_urgent=lambda: self._keeper.event("tap_urgent"))
        store.publish(DaemonNotice(options.job, self._instance, self._keyspace.digest, options.term))
        self._keeper.open(Hosted(store, intake))
        self._keeper.event("hosting", port=self._port)
        if self._journal.truncated_bytes:
            self._keeper.event("journal_truncated", bytes=self._journal.truncated_bytes)

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
            self._failure = self._keeper.reason = f"the control channel cannot be hosted: {first_line(error)}"
        else:
            self._tick_until_stopped()
        ending = self._failure or "the daemon is stopping"
        self._pusher.stop(ending)
        self._keeper.end(ending)
        self._tell_progress()
        # Closes the listening socket: a daemon started next can have the port.
        self._keeper.close()

    def _tick_until_stopped(self) -> None:
        last = time.monotonic()
        while not self._stopping.wait(self._pause_seconds()):
            now = time.monotonic()
            self._keeper.starved(max(now - last - 1.0, 0.0))
            last = now
            try:
                if self._may_act():
                    self._keeper.tick(now)
                else:
                    self._keeper.end(DEPOSED, failed=False)
            except CHANNEL_ERRORS as error:
                self._keeper.end(first_line(error))
            except Exception as error:
                # The thread must outlive every surprise; the next epoch starts clean.
                logger.exception("control channel: unexpected error")
                self._keeper.end(first_line(error))
            self._tell_progress()

    def _pause_seconds(self) -> float:
        return max(self._options.tick_seconds, _ALONE_SECONDS if self._keeper.alone else 0.0)

    def _tell_progress(self) -> None:
        self._news.tell(self._pusher.drain_events(), self._pusher.current)
