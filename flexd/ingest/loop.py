"""One thread that reads the stream into the sketches and makes both durable together."""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import FlexdError, SketchError, SnapshotError
from flexd.core.fault_points import fault_point
from flexd.core.keyspace import TableSpec
from flexd.core.layout import RankLayout
from flexd.ingest import counters
from flexd.ingest.backoff import Backoff
from flexd.ingest.counters import Counters
from flexd.ingest.dead_letters import DeadLetterFile
from flexd.ingest.message_counts import Tally
from flexd.ingest.rate import RateMeter, Totals
from flexd.ingest.restore import SNAPSHOT_META_FORMAT, restore
from flexd.ingest.saving import BackgroundJob
from flexd.ingest.shard import Decode, Shard
from flexd.ingest.stats import ROW_REASONS, IngestStats
from flexd.ingest.workers import Workers
from flexd.sketch.budget import TableChoice
from flexd.sketch.profile import Profile, TableProfile
from flexd.sketch.set_types import SketchSettings
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_set import SketchSet, warm_up
from flexd.stream.codecs.any_message import decode as decode_message
from flexd.stream.types import Positions, Source

_log = logging.getLogger(__name__)

IDLE_AFTER_SECONDS = 2.0
"""Without a message for so long and with nothing left to read, event time is taken to go on as the clock does."""
_LAG_INTERVAL_SECONDS = 1.0


class Ingestor:
    """Source -> decode -> sketches, in one thread that nothing but ``stop`` ends; others may decode and count for it.

    Bad messages and rows are counted by reason and sampled into the dead letters. A source that fails is tried again
    with back-off; a snapshot that cannot be written is counted and tried again at the next interval; ingest goes on.

    The newest usable snapshot is loaded on construction; its stream positions are restored when the thread starts. A
    snapshot of other tables or settings is reported (``stats().restore_problems``) and not used: sketches start empty
    and the source at its earliest message.

    **Threads.** With several, each has counters of its own for the partitions dealt to it (``Workers``), within one
    memory budget; profiles, snapshots and queries see them added up. What is saved is one state, whatever the number
    of threads: a restart may use another. Counters that were chosen for fewer threads limit it (``stats().threads``).

    **Idle streams.** Profiles and queries of a stream that has been read to its end and has been silent for
    ``IDLE_AFTER_SECONDS`` decay by the time since its last message. Only what is read moves on: the counters and their
    clock change with messages alone, so that a replay gives the same counters and the next event is not late. An outage
    is not idleness. After a restart the silence counts from the start of the process.

    Args:
        source: taken over; closed by the thread when it stops.
        tables, settings: of the sketches.
        snapshots: where state is saved; None saves nothing (the counters are handed on by ``cut``).
        dead_letters: None keeps none.
        snapshot_interval_seconds, poll_seconds: as in the configuration.
        max_message_bytes: larger messages are rejected undecoded.
        save_with: JSON-able values of the caller that are saved in the same snapshot (called in the ingest thread,
            without the lock); they come back as ``restored``.
        decode: message -> batches; raises CodecError.
        threads: that decode and count, at most ``counters.MAX_THREADS``.
        save_in_background: snapshots are written while ingest goes on; False stops ingest until they are on disk.

    Raises:
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
        save_with: Callable[[], Mapping[str, Any]] = dict,
        decode: Decode = decode_message,
        threads: int = 1,
        save_in_background: bool = True,
    ) -> None:
        if not 1 <= threads <= counters.MAX_THREADS:
            raise SketchError(f"{threads} ingest threads", remedy=f"use 1 to {counters.MAX_THREADS}")
        self._source = source
        self._snapshots = snapshots
        self._dead_letters = dead_letters
        self._snapshot_interval_seconds = snapshot_interval_seconds
        self._poll_seconds = poll_seconds
        self._save_with = save_with
        self._stop = threading.Event()
        self._save_now = threading.Event()
        self._thread: threading.Thread | None = None
        self._saving = BackgroundJob("flexd-snapshot", background=save_in_background)
        self._saving_positions: Positions = {}

        self._absorbed = Tally()
        self._cut_at = Tally()
        self._snapshot_count = self._snapshot_failures = self._commit_failures = self._source_failures = 0
        self._saved_at = math.nan
        self._pause_seconds = math.nan
        self._problems: dict[str, str] = {}
        """What is wrong right now, by the part that has the problem."""
        self._lag = 0
        self._lag_at = -math.inf
        self._rates = RateMeter(time.monotonic())
        self._counted_at = time.monotonic()

        found = restore(snapshots, tables, settings, threads)
        self.restored = found.saved
        """What ``save_with`` had returned for the snapshot that was restored; empty if none was."""
        self._restore_problems = found.problems
        self._positions = found.positions
        self._generation = found.generation
        self._generation_lock = threading.Lock()
        first = found.sketches
        possible = counters.threads_within(first, settings.memory_bytes, threads)
        if possible < threads:
            found.report(
                f"{possible} of {threads} ingest threads are used: the saved counters take the memory of the others"
            )
        sets = [first, *(first.emptied(secrets.randbits(62)) for _ in range(possible - 1))]
        shards = [Shard(sketches, dead_letters, max_message_bytes, decode) for sketches in sets]
        self._counters = Counters(shards)
        self._workers = Workers(shards)
        self._stats = self._read_stats()

    def start(self) -> None:
        """Compiles the kernels and starts the thread."""
        warm_up({choice.kind for choice in self._counters.choices()})
        self._thread = threading.Thread(target=self.run, name="flexd-ingest", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Ends the thread after a last snapshot; True if it ended within the deadline."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            return not self._thread.is_alive()
        return True

    def save_every(self, seconds: float) -> None:
        """Another time between two snapshots, from the next one on."""
        self._snapshot_interval_seconds = seconds

    def save_soon(self) -> None:
        """Asks the thread for a snapshot at the next opportunity."""
        self._save_now.set()

    def profile(
        self,
        accesses_per_step: Mapping[str, float] | float | None = None,
        layout: RankLayout | None = None,
    ) -> Profile:
        """A new profile (any thread), numbered one higher than the previous. Ingest waits only while one table's
        counters are copied at a time.
        """
        with self._generation_lock:
            self._generation += 1
            generation = self._generation
        lag = self._stats.lag_messages
        return self._counters.profile(accesses_per_step, generation, lag, layout, self._idle_seconds())

    def table_profile(self, table: str, layout: RankLayout | None = None) -> TableProfile:
        """One table as a profile would show it now (any thread); counts as no profile. Raises SketchError if it is
        unknown."""
        return self._counters.table_profile(table, layout, self._idle_seconds())

    def samples_by_table(self) -> tuple[int, ...]:
        """Accesses counted of each table, undecayed, in the configured order (any thread)."""
        return self._counters.samples_by_table()

    def absorb(self, sketches: SketchSet, tally: Tally, settle: Callable[[], None]) -> None:
        """Adds what another daemon has counted (any thread).

        Args:
            settle: called after the merge and under the same lock, so that no snapshot falls between the two: moves
                the positions. Must not raise.

        Raises:
            SketchError: sketches of other tables or settings. Nothing is added then, and ``settle`` is not called. Any
                other error (out of memory) may have added half of it: this ingest then saves nothing more and ends, so
                that the process is restarted from its last snapshot.
        """

        def settle_and_count() -> None:
            self._absorbed += tally
            settle()

        self._counters.absorb(sketches, settle_and_count)
        self._counted_at = time.monotonic()

    def cut(self, clock: Mapping[str, Any] | None = None) -> tuple[SketchSet, Tally]:
        """Takes out what was counted since the last cut and goes on with empty counters. Between two polls, in the
        thread that polls or while that waits.

        Args:
            clock: of another daemon's sketches (``SketchSet.clock``), taken in.

        Raises:
            SketchError: the clock is malformed; nothing has changed.
        """
        self._workers.settle()
        tally = self._counters.tally()
        taken = self._counters.cut(clock)
        since, self._cut_at = tally - self._cut_at, tally
        return taken, since

    def clock(self) -> dict[str, Any]:
        """As ``SketchSet.clock`` (any thread)."""
        return self._counters.clock()

    def choices(self) -> tuple[TableChoice, ...]:
        """How each table is counted, with the bytes of all threads."""
        return self._counters.choices()

    def query(self, table: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """int64[n] rows -> float64[n] decayed accesses, as ``SketchSet.query``."""
        return self._counters.query(table, rows, self._idle_seconds())

    def sequence_length_quantiles(self, table: str, ranks: Sequence[float]) -> npt.NDArray[np.float64]:
        """As ``SketchSet.sequence_length_quantiles``."""
        return self._counters.sequence_length_quantiles(table, ranks)

    def stats(self) -> IngestStats:
        """Any thread; takes no lock."""
        return dataclasses.replace(
            self._stats,
            idle_seconds=self._idle_seconds(),
            snapshot_age_seconds=time.monotonic() - self._saved_at,
            restore_problems=tuple(self._restore_problems),
            running=self._thread is not None and self._thread.is_alive(),
        )

    def run(self) -> None:
        """The thread's body; returns after ``stop``."""
        backoff = Backoff(self._stop)
        self._workers.start()
        while not self._stop.is_set() and not self._attempt("source", self._restore_positions):
            backoff.wait()
        backoff.reset()
        next_save = time.monotonic() + self._snapshot_interval_seconds
        while not self._stop.is_set() and not self._counters.half_merged:
            if self._attempt("source", self._read_some):
                backoff.reset()
            else:
                backoff.wait()
            if self._saving.ended:
                self._attempt("snapshot", self._end_save)
            if not self._saving.begun and (self._save_now.is_set() or time.monotonic() >= next_save):
                self._save_now.clear()
                self._attempt("snapshot state", self._begin_save)
                next_save = time.monotonic() + self._snapshot_interval_seconds
            if self._saving.ended:
                self._attempt("snapshot", self._end_save)
            self._stats = self._read_stats()
        self._finish()
        self._stats = self._read_stats()

    def _finish(self) -> None:
        if self._saving.begun:
            self._attempt("snapshot", self._end_save)
        restored = self._positions is None
        if restored and self._attempt("snapshot state", self._begin_save) and self._saving.begun:
            self._attempt("snapshot", self._end_save)
        self._attempt("source", self._source.close)
        self._workers.stop()

    def _attempt(self, part: str, action: Callable[[], None]) -> bool:
        """Runs one step of the loop; False if it failed, which is then counted, logged once and shown as a problem."""
        try:
            action()
        except Exception as error:
            if part.startswith("snapshot"):
                self._snapshot_failures += 1
            else:
                self._source_failures += 1
            text = str(error) if isinstance(error, FlexdError) else repr(error)
            if self._problems.get(part) != text:
                _log.warning("ingest: %s: %s", part, text, exc_info=not isinstance(error, FlexdError))
            self._problems[part] = text
            return False
        self._problems.pop(part, None)
        return True

    def _read_some(self) -> None:
        messages = self._source.poll(self._poll_seconds)
        if messages:
            self._workers.deal(messages)
            self._counted_at = time.monotonic()
        now = time.monotonic()
        if now >= self._lag_at + _LAG_INTERVAL_SECONDS:
            self._lag, self._lag_at = self._source.lag(), now

    def _begin_save(self) -> None:
        """Makes counters and positions durable; the order is what makes every access count once.

        1. Between two polls, wait until every message that the source has returned is counted. Then copy sketches,
           positions and profile generation while nothing else can change them. They go into one file: saved apart,
           a crash between the two would count the messages in between twice or never.
        2. Write the snapshot and wait until it is on disk. Ingest goes on meanwhile, with counters of its own.
        3. Only then tell the source (``_end_save``), the positions of step 1 and not those reached since. Its commit is
           for the broker's displays; a restart reads the snapshot's positions, so a crash between 2 and 3 loses
           nothing.
        """
        snapshots = self._snapshots
        if snapshots is None:
            return
        fault_point("snapshot.begin")
        saved = dict(self._save_with())
        # 1.
        began = time.monotonic()
        self._workers.settle()
        with self._counters.frozen() as state:
            if self._counters.half_merged:
                raise SnapshotError("counters are half merged and not saved", remedy="restart the daemon")
            positions = self._source.positions()
            generation = self._generation
        self._pause_seconds = time.monotonic() - began
        self._saving_positions = positions
        fault_point("snapshot.copied")

        # 2.
        def write() -> None:
            sketch_meta, arrays = state()
            meta = {
                "format": SNAPSHOT_META_FORMAT,
                "sketches": sketch_meta,
                "positions": positions,
                "generation": generation,
                "saved": saved,
            }
            snapshots.save(meta, arrays)

        self._saving.begin(write)

    def _end_save(self) -> None:
        """Step 3 of ``_begin_save``.

        Raises:
            SnapshotError: step 2 failed; the previous snapshot and its positions stay valid together.
        """
        self._saving.end()
        self._snapshot_count += 1
        self._saved_at = time.monotonic()
        # 3.
        failure = self._source.commit(self._saving_positions)
        fault_point("snapshot.committed")
        if failure is not None:
            self._commit_failures += 1
            _log.warning("ingest: commit: %s", failure)

    def _restore_positions(self) -> None:
        if self._positions is not None:
            self._source.restore(self._positions)
            self._positions = None

    def _idle_seconds(self) -> float:
        silent = time.monotonic() - self._counted_at
        reading = self._thread is not None and self._positions is None
        caught_up = reading and self._lag == 0 and not self._problems and self._source.problem is None
        return silent if caught_up and silent >= IDLE_AFTER_SECONDS else 0.0

    def _read_stats(self) -> IngestStats:
        total = self._counters.tally() + self._absorbed
        counts = total.counts
        self._rates.update(time.monotonic(), Totals(total.messages, counts.accepted))
        letters = self._dead_letters
        return IngestStats(
            messages=total.messages,
            accesses=counts.accepted,
            bytes=total.bytes,
            batches=total.batches,
            rejected_messages=total.rejected,
            rejected_accesses={reason: getattr(counts, reason) for reason in ROW_REASONS},
            adjusted_accesses={"future_clamped": counts.future_clamped, "late": counts.late},
            messages_per_second=self._rates.messages_per_second,
            accesses_per_second=self._rates.accesses_per_second,
            lag_messages=self._lag,
            messages_lost=self._source.messages_lost,
            newest_event_seconds=self._counters.newest_event_seconds,
            snapshots=self._snapshot_count,
            snapshot_failures=self._snapshot_failures,
            commit_failures=self._commit_failures,
            source_failures=self._source_failures,
            snapshot_pause_seconds=self._pause_seconds,
            dead_letters=letters.written if letters else 0,
            dead_letter_failures=letters.failures if letters else 0,
            threads=len(self._counters.shards),
            problem="; ".join(self._problems.values()) or self._source.problem,
        )
