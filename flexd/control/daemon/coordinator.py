"""The daemon's side of the control channel: registers ranks, opens epochs, pushes migrations, receives reports.

One thread decides everything, in ticks that nothing delays: messages are queued for the thread that serves the
connections (``ChannelServer``), and received from it. The address is bound before that thread starts: ranks that
connect meanwhile wait in the socket's queue.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from flexd.control.daemon.channel_events import ChannelCounters, ChannelOptions, Received
from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.daemon.epoch import RankChannels
from flexd.control.daemon.epoch_manager import ControlOptions, EpochManager, OnReport
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.membership import Membership, ProposedTables
from flexd.control.daemon.migration import Migration, MigrationEvent, MigrationRecord
from flexd.control.daemon.pusher import Throttle
from flexd.control.protocol.handshake import CHANNEL_ERRORS, ChannelCredentials, new_token
from flexd.control.protocol.messages import DaemonNotice
from flexd.core.errors import ControlError, first_line
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement
from flexd.core.supervision import Supervisor, fault_point, log_event
from flexd.planner.plan import Plan
from flexd.stream.tap_source import TapSource

logger = logging.getLogger(__name__)

# Longest time between two ticks while no rank is registered: a daemon that waits for a job must cost nothing.
_IDLE_TICK_SECONDS = 0.5
# Shortest time between two ticks, in units of ``tick_seconds``: messages that arrive meanwhile share a tick.
_TICKS_APART = 0.25
_MESSAGES_PER_TICK = 4096
# Deadline for what is queued for the ranks when the coordinator stops.
_STOP_SECONDS = 5.0


_LEARNER_STOP_SECONDS = 2.0


def channel_server(options: ControlOptions, port: int, supervisor: Supervisor) -> ChannelServer:
    """Return the channel of these options, bound. Raises ControlError if the address cannot be bound."""
    channel = ChannelOptions(
        options.listen_host, port, timeout_seconds=options.timeout_seconds, max_peers=options.max_ranks
    )
    return ChannelServer(channel, ChannelCredentials(options.secret, options.tls), supervisor)


class Coordinator(EpochManager):
    """Hosts the control channel. All methods are thread-safe, but for those that ``EpochManager`` keeps for the thread.

    Callbacks run in the coordinator's thread and must not block; what they raise is logged.

    Args:
        journal: makes the placement durable; the caller closes it after ``stop``.
        on_report: called with (rank, report) for every step report.
        on_event: called with (name, fields) for everything worth a log line or a metric, but for ``next_event``.
        tap: receives the accesses that the ranks have counted, if ``stream.source`` is a tap.
        throttle: bounds the chunks that are released and not applied; without one nothing is held back.
        supervisor: of the process; records the faults of the thread.

    Attributes:
        port: the bound port; 0 before ``listen``.
        failure: why the channel cannot be hosted; it is tried again. Empty while it is hosted or about to be.
    """

    def __init__(
        self,
        options: ControlOptions,
        keyspace: KeySpace,
        journal: PlacementJournal,
        on_report: OnReport = lambda rank, report: None,
        on_event: Callable[[str, Mapping[str, object]], None] = lambda name, fields: None,
        tap: TapSource | None = None,
        throttle: Throttle | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        super().__init__(options, keyspace, journal, on_report, on_event, tap, throttle)
        self._server: ChannelServer | None = None
        self.port = 0
        self.failure = ""
        self._hosted = False
        self._ticked_at = 0.0
        self._supervisor = supervisor = supervisor or Supervisor()
        self._watch = supervisor.watch("flexd-coordinator")
        self._thread = supervisor.thread("flexd-coordinator", self._run, self._stopping, self._finish)

    def listen(self) -> None:
        """Bind the address; ranks that connect wait until ``start``. Raises ControlError if it cannot be bound."""
        if self._server is None:
            self._server = channel_server(self._options, self.port or self._options.listen_port, self._supervisor)
            self.port = self._server.port

    def start(self) -> None:
        """Start to serve the ranks, without waiting. Raises ControlError as ``listen``."""
        self.listen()
        self.reason = "the control channel is not up yet"
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """End the epoch and the thread; False if it did not end within the deadline. Open migrations fail."""
        self._stopping.set()
        server = self._server
        if not self._thread.started:
            self._close_server()
        elif server is not None:
            server.unread.wake()
        return self._thread.join(timeout_seconds)

    def proposed_tables(self) -> ProposedTables | None:
        """Return the tables of an attempt whose ranks have all registered with others than the daemon has, while no
        other attempt holds the job. None where the daemon takes no tables from ranks."""
        return self.members.tables.proposed(time.monotonic()) if self._options.takes_tables else None

    def channel_counters(self) -> ChannelCounters:
        """Return the connections and bytes of the channel, since the start."""
        return ChannelCounters() if self._server is None else self._server.counters()

    def migrate(
        self,
        record: MigrationRecord,
        target: Placement,
        plan: Plan | None = None,
    ) -> Migration:
        """Submit a migration; it supersedes the one before it at its next chunk and is pushed while ranks are live.

        Args:
            record: its ids, who requested it and why. With a ``generation`` it fails if the ranks are of another one
                when it starts.
            target: the placement that it leads to.
            plan: with the changes from the placement of ``target.version`` to the target. They are made when it starts
                if there is no plan, or an older migration has moved rows by then.
        """
        migration = Migration(record, target, plan)
        if self._stopping.is_set() or self.failure:
            raise ControlError(self.failure or "the coordinator is stopping", remedy="start the daemon again")
        self.pusher.submit(migration)
        if self._server is not None:
            self._server.unread.wake()
        return migration

    def next_event(self) -> MigrationEvent | None:
        """Return the oldest change of a migration that nobody has taken yet, and log it; None if there is none."""
        event = self.pusher.next_event()
        if event is not None and (transition := event.transition) is not None:
            record = event.migration.record
            fields = {
                "migration_id": record.migration_id, "plan_id": record.plan_id,
                "before": transition.before.value if transition.before else "", "requested_by": record.requested_by,
                "reason": transition.reason, "rows": record.rows, "rows_pushed": transition.rows_pushed,
                "rows_applied": transition.rows_applied, "version": transition.version,
            }  # fmt: skip
            log_event(logger, logging.INFO, f"control channel: migration_{transition.after.value}", fields)
        return event

    def limit_chunks(self, rows: int, nbytes: int) -> None:
        """Set the bounds of one chunk, from the next one on."""
        self.pusher.limits = replace(self.pusher.limits, rows=rows, bytes=nbytes)

    def pause(self) -> None:
        """Push no further chunk until ``resume``; pushed chunks are applied."""
        self.pusher.paused = True

    def resume(self) -> None:
        """Push again; also ends a pause because of ``divergence``."""
        self.trust_again()
        self.pusher.paused = False

    def _close_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop(_STOP_SECONDS)

    def _run(self) -> None:
        if not self._hosted:
            try:
                self._host()
            except Exception as error:
                self._close_server()
                self.failure = self.reason = f"the control channel cannot be hosted: {first_line(error)}"
                raise
            self._hosted, self.failure, self._ticked_at = True, "", time.monotonic()
        self._tick_until_stopped()

    def _host(self) -> None:
        self.listen()
        assert self._server is not None  # noqa: S101
        self.channels.server = self._server
        self._server.start()
        self.reason = "no rank has registered"
        if self._earlier_attempt:
            self.members.expect(self._earlier_attempt, time.monotonic())
        self._emit("hosting", port=self.port)

    def _finish(self) -> None:
        reason = self.failure or "the daemon is stopping"
        self.pusher.stop(reason)
        self.end(reason)
        # Closes the listening socket: a daemon started next can have the port.
        self._close_server()

    def _tick_until_stopped(self) -> None:
        while not self._stopping.is_set():
            idle = _IDLE_TICK_SECONDS if self.has_no_ranks else 0.0
            received = self.channels.receive(_MESSAGES_PER_TICK, max(self._options.tick_seconds, idle))
            now = time.monotonic()
            self.members.excuse_silence(max(now - self._ticked_at - 1.0, 0.0))
            self._ticked_at = now
            try:
                fault_point("thread.coordinator")
                self.receive(received)
                self.tick(now)
            except CHANNEL_ERRORS as error:
                self.end(first_line(error))
            except Exception as error:
                # The next epoch starts clean, from the placement that the ranks have.
                self.end(first_line(error))
                raise
            self._watch.progress()
            self._stopping.wait(_TICKS_APART * self._options.tick_seconds)


class TableLearner:
    """The channel of a daemon that has no tables yet: receives those of the ranks, and pushes nothing.

    Belongs to the daemon's loop, which ticks it.

    Raises:
        ControlError: the address cannot be bound.

    Attributes:
        members: the ranks, and the tables that they propose. With a ``problem`` they are refused.
    """

    def __init__(self, options: ControlOptions, supervisor: Supervisor) -> None:
        self.members = Membership(options.job, None, options.timeout_seconds, max_ranks=options.max_ranks)
        self._server = channel_server(options, options.listen_port, supervisor)
        notice = DaemonNotice(options.job, new_token(), "")
        self._channels = RankChannels(notice, options.timeout_seconds, self.members, lambda *_, **__: None)
        self._channels.server = self._server

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        """Close all connections; the ranks connect again."""
        self._server.stop(_LEARNER_STOP_SECONDS)

    def tick(self) -> ProposedTables | None:
        """Receive what has arrived. Returns the tables of an attempt whose ranks have all registered."""
        now = time.monotonic()
        for event in self._channels.receive(_MESSAGES_PER_TICK, 0.0):
            if isinstance(event, Received):
                self._channels.dispatch(event, now)
            else:
                self.members.mark_disconnected(event.hello, now)
        self.members.expire(now)
        self._channels.send_heartbeats(now)
        return self.members.tables.proposed(now)

    def reason(self) -> str:
        """Return what the daemon waits for, in words."""
        return self.members.problem or self.members.tables.waits_for(time.monotonic())
