"""The ingest thread: reads the stream into the sketches and saves both together."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexd.core.backoff import Backoff
from flexd.core.errors import FlexdError
from flexd.core.fault_points import fault_point
from flexd.core.keyspace import TableSpec
from flexd.core.layout import RankLayout
from flexd.core.supervision import Supervisor, UnsafeStateError
from flexd.ingest.dead_letters import DeadLetterFile
from flexd.ingest.message_counter import ArrivalClock, Decode, MessageCounter, decode_message
from flexd.ingest.restore import restore
from flexd.ingest.snapshot_cycle import SnapshotCycle
from flexd.ingest.stats import ROW_REASONS, IngestStats, RateMeter
from flexd.sketch.kinds import warm_up
from flexd.sketch.profile import Profile, TableProfile
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.types import SketchSettings
from flexd.stream.offsets_in_work import OffsetsInWork
from flexd.stream.types import Source

_log = logging.getLogger(__name__)

IDLE_AFTER_SECONDS = 2.0
"""A stream that has been read to its end is idle after this long without a message: event time then follows the
clock."""
_LAG_INTERVAL_SECONDS = 1.0
_BACKOFF_SECONDS = (0.1, 5.0)
"""Shortest and longest wait after a failure of the source."""


class Ingestor:
    """Source -> decode -> sketches, in one thread that only ``stop`` ends.

    Bad messages and rows are counted by reason and sampled into the dead letters. A source that fails is retried
    with back-off. A snapshot that cannot be written is counted and retried at the next interval; ingest continues.

    The newest usable snapshot is loaded on construction, table by table (``flexd.ingest.restore``); its stream
    positions are restored when the thread starts.

    **Idle streams.** Profiles and queries of a stream that has been read to its end and has had no message for
    ``IDLE_AFTER_SECONDS`` decay by the time since its last message. Only the reading is moved: the counters and their
    clock change with messages alone, so a replay gives the same counters and the next event is not late. An outage
    is not idleness. After a restart the idle time counts from the start of the process.

    Args:
        source: owned by the ingestor; closed by the thread when it stops.
        tables, settings: of the sketches.
        snapshots: where state is saved; None saves nothing.
        dead_letters: None keeps none.
        snapshot_interval_seconds, poll_seconds: as in the configuration.
        max_message_bytes: larger messages are rejected undecoded.
        extra_state: returns JSON-able values of the caller to save in the same snapshot (called in the ingest thread,
            without the lock); they come back as ``restored``.
        decode: message -> batches; raises CodecError.
        work: records what is being counted; the source records in the same one what it reads. Closed by the thread.
        clock: Unix seconds; accesses dated later than this, beyond the allowance, are counted at their arrival.
        save_in_background: snapshots are written while ingest continues; False stops ingest until they are on disk.
        supervisor: of the process; records the faults of the thread.
        start_empty: set saved state aside that cannot be used, and start without it.

    Raises:
        UnusableStateError: there is saved state, and none of it can be used.
        SketchError, ConfigError: impossible sketch settings or tables.
    """

    def __init__(
        self,
        source: Source,
        tables: Sequence[TableSpec],
        settings: SketchSettings,
        snapshots: SnapshotStore | None,
        *,
        dead_letters: DeadLetterFile | None = None,
        snapshot_interval_seconds: float = 30.0,
        poll_seconds: float = 0.2,
        max_message_bytes: int = 16 * 2**20,
        extra_state: Callable[[], Mapping[str, Any]] = dict,
        decode: Decode = decode_message,
        work: OffsetsInWork | None = None,
        clock: Callable[[], float] = time.time,
        save_in_background: bool = True,
        supervisor: Supervisor | None = None,
        start_empty: bool = False,
    ) -> None:
        self._source = source
        self._snapshots = SnapshotCycle(
            snapshots, snapshot_interval_seconds, extra_state, background=save_in_background
        )
        self._dead_letters = dead_letters
        self._work = work or OffsetsInWork()
        self._arrivals = ArrivalClock(clock)
        self._poll_seconds = poll_seconds
        self._stop = threading.Event()
        supervisor = supervisor or Supervisor()
        self._watch = supervisor.watch("flexd-ingest")
        self._thread = supervisor.thread("flexd-ingest", self._loop, self._stop, self._finish)

        self._snapshot_failures = self._source_failures = 0
        self._problems: dict[str, str] = {}
        """Current problem of each step of the loop that has one."""
        self._lag = 0
        self._lag_at = -math.inf
        self._rates = RateMeter(time.monotonic())
        self._counted_at = time.monotonic()
        self._backlog: bool | None = None
        """From the first messages on until a poll has none: by then every partition has been seen. None: not begun."""

        state = restore(snapshots, tables, settings, start_empty=start_empty)
        self.restored = state.extra
        """The ``extra_state`` of the restored snapshot; empty if none was restored."""
        self.restored_from = state.path
        """The restored snapshot; None if none was restored."""
        self.outcomes = state.outcomes
        """The fate of each table of the restored snapshot."""
        self._restore_problems = state.problems
        self._unrestored_positions = state.positions
        self._generation = state.generation
        self._generation_lock = threading.Lock()
        self.sketches = state.sketches
        """What was counted. Profiles are read by the methods here: they are of the whole stream, as of now."""
        self._counter = MessageCounter(
            self.sketches, dead_letters, max_message_bytes, decode, self._work, self._arrivals
        )
        self._stats = self._read_stats()

    def start(self) -> None:
        """Compile the kernels and start the thread."""
        warm_up(
            {choice.kind for choice in self.sketches.choices()},
            coaccess=self.sketches.coaccess_sample is not None,
        )
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread after a last snapshot. Return True if it ended within the deadline."""
        self._stop.set()
        return self._thread.join(timeout_seconds)

    def set_snapshot_interval(self, seconds: float) -> None:
        """Change the time between two snapshots, effective after the next one."""
        self._snapshots.set_interval(seconds)

    def request_snapshot(self) -> None:
        """Make the thread take a snapshot at the next opportunity."""
        self._snapshots.request()

    def profile(
        self,
        accesses_per_step: Mapping[str, float] | float | None = None,
        layout: RankLayout | None = None,
    ) -> Profile:
        """Return a new profile (any thread), numbered one higher than the previous.

        Ingest waits only while one table's counters are copied at a time.
        """
        with self._generation_lock:
            self._generation += 1
            generation = self._generation
        lag = self._stats.lag_messages
        found = self.sketches.profile(accesses_per_step, generation, lag, layout, self._idle_seconds())
        return dataclasses.replace(found, tables=tuple(map(self._scaled, found.tables)))

    def table_profile(self, table: str, layout: RankLayout | None = None) -> TableProfile:
        """Return the present profile of one table (any thread), without numbering it.

        Raises:
            SketchError: unknown table.
        """
        return self._scaled(self.sketches.table_profile(table, layout, self._idle_seconds()))

    def stats(self) -> IngestStats:
        """Return the present statistics (any thread; takes no lock)."""
        return dataclasses.replace(
            self._stats,
            idle_seconds=self._idle_seconds(),
            snapshot_age_seconds=time.monotonic() - self._snapshots.saved_at,
            restore_problems=tuple(self._restore_problems),
            running=self._thread.running,
        )

    def run(self) -> None:
        """Run what the thread runs; returns after ``stop``.

        Raises:
            UnsafeStateError: the counters hold an unknown part of a message. Nothing is saved then.
        """
        self._loop()
        self._finish()

    def _loop(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS)
        while not self._stop.is_set() and not self._attempt("source", self._restore_positions):
            self._stop.wait(backoff.seconds())
        backoff.reset()
        self._snapshots.start()
        while not self._stop.is_set():
            fault_point("thread.ingest")
            if self._attempt("source", self._read_some):
                backoff.reset()
            else:
                self._stop.wait(backoff.seconds())
            if self._snapshots.written:
                self._attempt("snapshot", self._finish_save)
            if self._snapshots.is_due():
                self._attempt("snapshot state", self._begin_save)
                self._snapshots.restart()
            if self._snapshots.written:
                self._attempt("snapshot", self._finish_save)
            self._stats = self._read_stats()
            self._watch.progress()
            if self.sketches.damage is not None:
                raise UnsafeStateError(
                    f"the counters may hold a part of a message: {self.sketches.damage!r}",
                    remedy="start the daemon again; it continues from its newest snapshot",
                ) from self.sketches.damage

    def _finish(self) -> None:
        if self._snapshots.pending:
            self._attempt("snapshot", self._finish_save)
        restored = self._unrestored_positions is None
        if restored and self._attempt("snapshot state", self._begin_save) and self._snapshots.pending:
            self._attempt("snapshot", self._finish_save)
        self._attempt("source", self._source.close)
        if self.sketches.damage is None:
            self._work.close()
        self._stats = self._read_stats()

    def _attempt(self, step: str, action: Callable[[], None]) -> bool:
        """Run one step of the loop. Return False if it failed: counted, logged once, and shown as a problem."""
        try:
            action()
        except Exception as error:
            if step.startswith("snapshot"):
                self._snapshot_failures += 1
            else:
                self._source_failures += 1
            text = str(error) if isinstance(error, FlexdError) else repr(error)
            if not isinstance(error, FlexdError):
                self._watch.count(error)
            elif self._problems.get(step) != text:
                _log.warning("ingest: %s: %s", step, text)
            self._problems[step] = text
            return False
        self._problems.pop(step, None)
        return True

    def _read_some(self) -> None:
        messages = self._source.poll(self._poll_seconds)
        if self._backlog is None and messages:
            self._set_backlog(True)
        elif self._backlog and not messages:
            self._set_backlog(False)
        if messages:
            count = self._counter.count
            for message in messages:
                count(message)
                if self.sketches.damage is not None:
                    return
            self._work.end()
            self._counted_at = time.monotonic()
        now = time.monotonic()
        self._counter.skew.update(now)
        if now >= self._lag_at + _LAG_INTERVAL_SECONDS:
            self.sketches.limit_clock(self._arrivals.now())
            self._lag, self._lag_at = self._source.lag(), now

    def _set_backlog(self, backlog: bool) -> None:
        self._backlog = backlog
        self.sketches.set_backlog(backlog)

    def _begin_save(self) -> None:
        self._snapshots.begin(self._source, self.sketches, lambda: self._generation)

    def _finish_save(self) -> None:
        self._snapshots.finish(self._source)

    def _restore_positions(self) -> None:
        if self._unrestored_positions is not None:
            self._source.restore(self._unrestored_positions)
            self._unrestored_positions = None

    def _scaled(self, table: TableProfile) -> TableProfile:
        """Return a table's profile with the weight of the whole stream, of which a share is read."""
        return dataclasses.replace(table, weight=table.weight / self._source.read_share)

    def _idle_seconds(self) -> float:
        silent = time.monotonic() - self._counted_at
        reading = self._thread.started and self._unrestored_positions is None
        caught_up = reading and self._lag == 0 and not self._problems and self._source.problem is None
        return silent if caught_up and silent >= IDLE_AFTER_SECONDS else 0.0

    def _read_stats(self) -> IngestStats:
        counted, counts = self._counter, self._counter.accesses
        self._rates.update(time.monotonic(), counted.messages, counts.accepted)
        letters, losses = self._dead_letters, self._source.losses()
        return IngestStats(
            messages=counted.messages,
            accesses=counts.accepted,
            bytes=counted.bytes,
            batches=counted.batches,
            rejected_messages=dict(counted.rejected),
            rejected_accesses={reason: getattr(counts, reason) for reason in ROW_REASONS},
            adjusted_accesses={"future_clamped": counts.future_clamped, "late": counts.late},
            messages_per_second=self._rates.messages_per_second,
            accesses_per_second=self._rates.accesses_per_second,
            lag_messages=self._lag,
            read_share=self._source.read_share,
            messages_lost=losses.messages,
            positions_lost=losses.positions,
            newest_event_seconds=self.sketches.newest_event_seconds,
            least_skew_seconds=self._counter.skew.least_seconds,
            most_skew_seconds=self._counter.skew.most_seconds,
            snapshots=self._snapshots.saved,
            snapshot_failures=self._snapshot_failures,
            commit_failures=self._snapshots.commit_failures,
            source_failures=self._source_failures,
            snapshot_pause_seconds=self._snapshots.pause_seconds,
            dead_letters=letters.written if letters else 0,
            dead_letter_failures=letters.failures if letters else 0,
            problem="; ".join(self._problems.values()) or self._source.problem,
            not_ready=self._not_ready(),
            connected="source" not in self._problems and self._source.problem is None,
        )

    def _not_ready(self) -> tuple[str, ...]:
        """Return the current problems, each with the part that has it."""
        found = [
            f"{'snapshots' if step.startswith('snapshot') else 'stream'}: {text}"
            for step, text in self._problems.items()
        ]
        if "source" not in self._problems and self._source.problem is not None:
            found.append(f"stream: {self._source.problem}")
        return tuple(found)
