"""One thread that reads the stream into the sketches and makes both durable together."""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.dead_letters import DeadLetterFile
from flexd.errors import CodecError, FlexdError, SketchError, SnapshotError
from flexd.keyspace import TableSpec
from flexd.sketch.budget import TableChoice
from flexd.sketch.profile import Profile
from flexd.sketch.snapshot import LoadedSnapshot, SnapshotStore
from flexd.sketch.table_set import IngestCounts, SketchSet, SketchSettings, warm_up
from flexd.stream.codec import decode as decode_message
from flexd.stream.types import AccessBatch, Message, Source
from flexd.tally import MAX_REASONS, Tally

_log = logging.getLogger(__name__)

SNAPSHOT_META_FORMAT = 1
GENERATION_RESERVE = 1000
"""Added to the saved profile generation on restore: profiles made after the snapshot was taken keep their numbers."""
_BACKOFF_SECONDS = (0.1, 5.0)
_LAG_INTERVAL_SECONDS = 1.0
_RATE_WINDOW_SECONDS = 2.0
_ROW_REASONS = ("unknown_table", "negative_row", "row_out_of_range")

Decode = Callable[[bytes | memoryview, int], list[AccessBatch]]


@dataclass(frozen=True)
class IngestStats:
    """Counters since the process started, and gauges as of the last poll.

    Attributes:
        messages, accesses, bytes, batches: read; accesses are those counted.
        rejected_messages: by reason (``CodecError.reason``, ``internal_error``).
        rejected_accesses: by reason (``unknown_table``, ``negative_row``, ``row_out_of_range``).
        adjusted_accesses: counted by rule (``future_clamped``: at another time than dated; ``late``: at their own).
        messages_per_second, accesses_per_second: over the last seconds.
        lag_messages: not read yet, as far as the source knows.
        messages_lost: that the source knows to have existed and could not deliver.
        newest_event_seconds: NaN before the first access.
        snapshots, snapshot_failures, commit_failures, source_failures: counted.
        snapshot_age_seconds: since the newest durable snapshot of this process, NaN before the first.
        dead_letters, dead_letter_failures: samples kept, and not written.
        problem: what is wrong right now, or None.
        restore_problems: what was wrong with the saved state at start.
        running: the thread is alive.
    """

    messages: int = 0
    accesses: int = 0
    bytes: int = 0
    batches: int = 0
    rejected_messages: Mapping[str, int] = field(default_factory=dict)
    rejected_accesses: Mapping[str, int] = field(default_factory=dict)
    adjusted_accesses: Mapping[str, int] = field(default_factory=dict)
    messages_per_second: float = 0.0
    accesses_per_second: float = 0.0
    lag_messages: int = 0
    messages_lost: int = 0
    newest_event_seconds: float = math.nan
    snapshots: int = 0
    snapshot_failures: int = 0
    commit_failures: int = 0
    source_failures: int = 0
    snapshot_age_seconds: float = math.nan
    dead_letters: int = 0
    dead_letter_failures: int = 0
    problem: str | None = None
    restore_problems: tuple[str, ...] = ()
    running: bool = False


class Ingestor:
    """Source -> decode -> sketches, in one thread that nothing but ``stop`` ends.

    Bad messages and rows are counted by reason and sampled into the dead letters. A source that fails is tried again
    with back-off; a snapshot that cannot be written is counted and tried again at the next interval; ingest goes on.

    The newest usable snapshot is loaded on construction; its stream positions are restored when the thread starts. A
    snapshot of other tables or settings is reported (``stats().restore_problems``) and not used: sketches start empty
    and the source at its earliest message.

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
    ) -> None:
        self._source = source
        self._snapshots = snapshots
        self._dead_letters = dead_letters
        self._snapshot_interval_seconds = snapshot_interval_seconds
        self._poll_seconds = poll_seconds
        self._max_message_bytes = max_message_bytes
        self._save_with = save_with
        self._decode = decode
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._save_now = threading.Event()
        self._thread: threading.Thread | None = None

        self._messages = self._bytes = self._batches = 0
        self._counts = IngestCounts()
        self._rejected: dict[str, int] = {}
        self._absorbed = Tally()
        self._cut_at = Tally()
        self._snapshot_count = self._snapshot_failures = self._commit_failures = self._source_failures = 0
        self._saved_at = math.nan
        self._problems: dict[str, str] = {}
        """What is wrong right now, by the part that has the problem."""
        self._lag = 0
        self._lag_at = -math.inf
        self._rates = (0.0, 0.0)
        self._rate_from = (time.monotonic(), 0, 0)

        self.restored: dict[str, Any] = {}
        """What ``save_with`` had returned for the snapshot that was restored; empty if none was."""
        self._restore_problems: list[str] = []
        self._positions: dict[str, int] | None = None
        self._generation = 0
        self._sketches = self._load(tables, settings)
        self._stats = self._read_stats()

    def start(self) -> None:
        """Compiles the kernels and starts the thread."""
        warm_up()
        self._thread = threading.Thread(target=self.run, name="flexd-ingest", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Ends the thread after a last snapshot; True if it ended within the deadline."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            return not self._thread.is_alive()
        return True

    def save_soon(self) -> None:
        """Asks the thread for a snapshot at the next opportunity."""
        self._save_now.set()

    def profile(self, accesses_per_step: Mapping[str, float] | float | None = None) -> Profile:
        """A new profile (any thread), numbered one higher than the previous. Ingest waits only while one table's
        counters are copied at a time.
        """
        with self._guard:
            self._generation += 1
            generation = self._generation
        return self._sketches.profile(accesses_per_step, generation, self._stats.lag_messages, self._guard)

    def absorb(self, sketches: SketchSet, tally: Tally, settle: Callable[[], None]) -> None:
        """Adds what another daemon has counted (any thread).

        Args:
            settle: called after the merge and under the same lock, so that no snapshot falls between the two: moves
                the positions. Must not raise.

        Raises:
            SketchError: sketches of other tables or settings. Nothing is added then, and ``settle`` is not called.
        """
        with self._guard:
            self._sketches.merge(sketches)
            self._absorbed += tally
            settle()

    def cut(self, clock: Mapping[str, Any] | None = None) -> tuple[SketchSet, Tally]:
        """Takes out what was counted since the last cut and goes on with empty counters. Between two polls, in the
        thread that polls.

        Args:
            clock: of another daemon's sketches (``SketchSet.clock``), taken in.

        Raises:
            SketchError: the clock is malformed; nothing has changed.
        """
        tally = self._tally()
        with self._guard:
            taken = self._sketches
            self._sketches = taken.emptied(secrets.randbits(62), clock)
        since, self._cut_at = tally - self._cut_at, tally
        return taken, since

    def clock(self) -> dict[str, Any]:
        """As ``SketchSet.clock`` (any thread)."""
        with self._guard:
            return self._sketches.clock()

    def _tally(self) -> Tally:
        return Tally(self._messages, self._bytes, self._batches, self._counts, dict(self._rejected))

    def choices(self) -> tuple[TableChoice, ...]:
        """How each table is counted."""
        return self._sketches.choices()

    def query(self, table: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """int64[n] rows -> float64[n] decayed accesses, as ``SketchSet.query``."""
        with self._guard:
            return self._sketches.query(table, rows)

    def sequence_length_quantiles(self, table: str, ranks: Sequence[float]) -> npt.NDArray[np.float64]:
        """As ``SketchSet.sequence_length_quantiles``."""
        with self._guard:
            return self._sketches.sequence_length_quantiles(table, ranks)

    def stats(self) -> IngestStats:
        """Any thread; takes no lock."""
        return dataclasses.replace(
            self._stats,
            snapshot_age_seconds=time.monotonic() - self._saved_at,
            restore_problems=tuple(self._restore_problems),
            running=self._thread is not None and self._thread.is_alive(),
        )

    def run(self) -> None:
        """The thread's body; returns after ``stop``."""
        backoff = _Backoff(self._stop)
        while not self._stop.is_set() and not self._attempt("source", self._restore_positions):
            backoff.wait()
        backoff.reset()
        next_save = time.monotonic() + self._snapshot_interval_seconds
        while not self._stop.is_set():
            if self._attempt("source", self._read_some):
                backoff.reset()
            else:
                backoff.wait()
            # Only here, between two polls, do the source's positions and the counters speak of the same messages.
            if self._save_now.is_set() or time.monotonic() >= next_save:
                self._save_now.clear()
                self._attempt("snapshot", self._save)
                next_save = time.monotonic() + self._snapshot_interval_seconds
            self._stats = self._read_stats()
        if self._positions is None:
            self._attempt("snapshot", self._save)
        self._attempt("source", self._source.close)
        self._stats = self._read_stats()

    def _attempt(self, part: str, action: Callable[[], None]) -> bool:
        """Runs one step of the loop; False if it failed, which is then counted, logged once and shown as a problem."""
        try:
            action()
        except Exception as error:
            if part == "snapshot":
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
        for message in messages:
            self._take(message)
        now = time.monotonic()
        if now >= self._lag_at + _LAG_INTERVAL_SECONDS:
            self._lag, self._lag_at = self._source.lag(), now

    def _take(self, message: Message) -> None:
        """Counts one message. Never raises: the source has moved past it."""
        self._messages += 1
        self._bytes += len(message.payload)
        try:
            batches = self._decode(message.payload, self._max_message_bytes)
            with self._guard:
                counts = sum((self._count(batch) for batch in batches), IngestCounts())
        except CodecError as error:
            self._reject(error.reason, str(error), message)
            return
        except Exception as error:
            _log.exception("ingest: message %s/%d", message.partition, message.offset)
            self._reject("internal_error", repr(error), message)
            return
        self._batches += len(batches)
        self._counts += counts
        if self._dead_letters is not None:
            for reason in _ROW_REASONS:
                if rejected := getattr(counts, reason):
                    self._dead_letters.record(reason, f"{rejected} accesses of the message", message)

    def _count(self, batch: AccessBatch) -> IngestCounts:
        return self._sketches.ingest(
            batch.table, batch.rows, batch.source_rank, batch.event_time_seconds, batch.sequence_lengths
        )

    def _reject(self, reason: str, detail: str, message: Message) -> None:
        if reason not in self._rejected and len(self._rejected) >= MAX_REASONS:
            reason = "other"
        self._rejected[reason] = self._rejected.get(reason, 0) + 1
        if self._dead_letters is not None:
            self._dead_letters.record(reason, detail, message)

    def _save(self) -> None:
        """Makes counters and positions durable; the order is what makes every access count once.

        1. Copy sketches, positions and profile generation while no message is half counted. They go into one file:
           saved apart, a crash between the two would count the messages in between twice or never.
        2. Write the snapshot and wait until it is on disk.
        3. Only then tell the source. Its commit is for the broker's displays; a restart reads the snapshot's positions,
           so a crash between 2 and 3 loses nothing.

        Raises:
            SnapshotError: step 2 failed; the previous snapshot and its positions stay valid together.
        """
        if self._snapshots is None:
            return
        saved = dict(self._save_with())
        # 1.
        with self._guard:
            sketch_meta, arrays = self._sketches.state()
            positions = self._source.positions()
            generation = self._generation
        meta = {
            "format": SNAPSHOT_META_FORMAT,
            "sketches": sketch_meta,
            "positions": positions,
            "generation": generation,
            "saved": saved,
        }
        # 2.
        self._snapshots.save(meta, arrays)
        self._snapshot_count += 1
        self._saved_at = time.monotonic()
        # 3.
        failure = self._source.commit(positions)
        if failure is not None:
            self._commit_failures += 1
            _log.warning("ingest: commit: %s", failure)

    def _load(self, tables: Sequence[TableSpec], settings: SketchSettings) -> SketchSet:
        empty = SketchSet.of(tables, settings)
        if self._snapshots is None:
            return empty
        try:
            loaded = self._snapshots.load_newest()
        except SnapshotError as error:
            self._report_restore(str(error))
            return empty
        if loaded is None:
            return empty
        for problem in loaded.problems:
            self._report_restore(problem)
        try:
            return self._unpack(loaded, tables, settings)
        except (SketchError, KeyError, TypeError, ValueError, AttributeError) as error:
            self._report_restore(f"{loaded.path} is not used: {error}")
            return empty

    def _unpack(self, loaded: LoadedSnapshot, tables: Sequence[TableSpec], settings: SketchSettings) -> SketchSet:
        meta = loaded.meta
        if meta.get("format") != SNAPSHOT_META_FORMAT:
            raise SketchError(f"saved state of format {meta.get('format')!r}")
        positions = {str(partition): int(offset) for partition, offset in meta["positions"].items()}
        generation = int(meta["generation"])
        saved = dict(meta["saved"])
        sketches = SketchSet.from_state(tables, settings, meta["sketches"], loaded.arrays)
        self._positions, self._generation, self.restored = positions, generation + GENERATION_RESERVE, saved
        return sketches

    def _restore_positions(self) -> None:
        if self._positions is not None:
            self._source.restore(self._positions)
            self._positions = None

    def _report_restore(self, problem: str) -> None:
        _log.warning("ingest: %s", problem)
        self._restore_problems.append(problem)

    def _read_stats(self) -> IngestStats:
        now, total = time.monotonic(), self._tally() + self._absorbed
        counts = total.counts
        since, messages, accesses = self._rate_from
        if now - since >= _RATE_WINDOW_SECONDS:
            self._rates = ((total.messages - messages) / (now - since), (counts.accepted - accesses) / (now - since))
            self._rate_from = (now, total.messages, counts.accepted)
        letters = self._dead_letters
        return IngestStats(
            messages=total.messages,
            accesses=counts.accepted,
            bytes=total.bytes,
            batches=total.batches,
            rejected_messages=total.rejected,
            rejected_accesses={reason: getattr(counts, reason) for reason in _ROW_REASONS},
            adjusted_accesses={"future_clamped": counts.future_clamped, "late": counts.late},
            messages_per_second=self._rates[0],
            accesses_per_second=self._rates[1],
            lag_messages=self._lag,
            messages_lost=self._source.messages_lost,
            newest_event_seconds=self._sketches.newest_event_seconds,
            snapshots=self._snapshot_count,
            snapshot_failures=self._snapshot_failures,
            commit_failures=self._commit_failures,
            source_failures=self._source_failures,
            dead_letters=letters.written if letters else 0,
            dead_letter_failures=letters.failures if letters else 0,
            problem="; ".join(self._problems.values()) or self._source.problem,
        )


class _Backoff:
    """Waits longer after every failure in a row, up to a bound; ``stop`` ends a wait."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._seconds = _BACKOFF_SECONDS[0]

    def wait(self) -> None:
        self._stop.wait(self._seconds)
        self._seconds = min(2 * self._seconds, _BACKOFF_SECONDS[1])

    def reset(self) -> None:
        self._seconds = _BACKOFF_SECONDS[0]
