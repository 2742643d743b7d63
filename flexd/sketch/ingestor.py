"""The ingest thread: reads the stream into the sketches and saves both together."""

import dataclasses
import functools
import logging
import math
import operator
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence

from flexd.core import tap_counts
from flexd.core.errors import CodecError, FlexdError
from flexd.core.keyspace import TableSpec
from flexd.core.placement import RankLayout
from flexd.core.supervision import Backoff, Supervisor, UnsafeStateError, fault_point
from flexd.core.tap_counts import TapCounts
from flexd.sketch.dead_letters import DeadLetterFile
from flexd.sketch.id_stream import IdsSeen, IdStream
from flexd.sketch.profile import Profile, TableProfile
from flexd.sketch.restore import restore
from flexd.sketch.sketch_set import AccessCounts, SketchSet, warm_up
from flexd.sketch.snapshot import SnapshotCycle, SnapshotStore
from flexd.sketch.table_sketch import SketchSettings
from flexd.stream import codec
from flexd.stream.types import (
    REFUSAL_REASONS,
    TOMBSTONE,
    AccessBatch,
    Decoder,
    OffsetsInWork,
    RefusedMessages,
    Source,
    StreamMessage,
)

_log = logging.getLogger(__name__)

# A stream that has been read to its end is idle after this long without a message: event time then follows the clock.
IDLE_AFTER_SECONDS = 2.0
# Shortest and longest wait after a failure of the source.
_BACKOFF_SECONDS = (0.1, 5.0)
# Reasons for which a whole message is not counted.
MESSAGE_REASONS = tuple(sorted({*codec.REASONS, *tap_counts.REASONS, *REFUSAL_REASONS, "internal_error"}))
# Reasons for which single accesses are not counted.
ROW_REASONS = ("unknown_table", "negative_row", "row_out_of_range")
SKEW_SECONDS = 10.0
# Ranks with a tap send one message each and then nothing until the daemon's next snapshot, half a minute later.
RATE_SECONDS = 60.0


def decode_message(payload: bytes | memoryview, max_message_bytes: int) -> Sequence[AccessBatch | TapCounts]:
    """Decode a message of accesses or the counts of a tap; its first bytes tell the kind.

    Counts of a tap have a size limit of their own (``tap_counts.MAX_PAYLOAD_BYTES``), because one message holds a whole
    interval of a rank.

    Raises:
        CodecError: ``reason`` is one of ``codec.REASONS`` or ``tap_counts.REASONS``.
    """
    if bytes(payload[: len(tap_counts.MAGIC)]) == tap_counts.MAGIC:
        return [tap_counts.decode(payload)]
    return codec.decode(payload, max_message_bytes)


class MessageCounter:
    """Counts messages into sketches. ``count`` belongs to one thread; any thread may read the attributes.

    Attributes:
        messages: counted or rejected.
        bytes: of their payloads.
        tombstones: messages without a value; they are not among ``messages``.
        accesses: of the counted messages, by outcome.
        rejected: messages not counted, by reason.
        skew_seconds: event time minus arrival of the accesses of the last whole window of ``SKEW_SECONDS``: (least,
            most), NaN if it had none.

    Args:
        max_message_bytes: larger messages are rejected undecoded.
        work: records the message that is being counted; the caller ends it after the last message of a poll.
        decoder: of messages in another format than flexd's own. What it has collected is counted by ``flush``.
    """

    def __init__(
        self,
        sketches: SketchSet,
        dead_letters: DeadLetterFile,
        max_message_bytes: int,
        work: OffsetsInWork,
        decoder: Decoder | None = None,
    ) -> None:
        self._sketches = sketches
        self._dead_letters = dead_letters
        self._max_message_bytes = max_message_bytes
        self._work = work
        self.decoder = decoder
        # Newest arrival of the messages that the decoder has collected.
        self._collected_arrival = -math.inf
        # Newest time of append by partition.
        self._appended: dict[str, float] = {}
        self.messages = self.bytes = self.tombstones = 0
        self.accesses = AccessCounts()
        self.rejected: dict[str, int] = {}
        self.skew_seconds = (math.nan, math.nan)
        self._window_skew = (math.inf, -math.inf)
        self._window_end = -math.inf

    def count(self, message: StreamMessage | RefusedMessages) -> None:
        """Count one message.

        A message that cannot be decoded is rejected as a whole. What was decoded can be counted (``AccessBatch`` and
        ``tap_counts.decode`` have checked it).

        Raises:
            Exception: counting failed nevertheless, so a part of the message may be in the counters: they are damaged
                (``SketchSet.damage``), and the caller must not go on. The next start continues from the newest
                snapshot, which holds nothing of it. The counts of messages by outcome are short of this one.
        """
        if isinstance(message, RefusedMessages):
            if message.reason == TOMBSTONE:
                self.tombstones += message.messages
                return
            self._reject(message.reason, message.detail, message, message.messages)
            return
        if not self._work.begin(message.partition, message.offset, message.offset, counting=True):
            self._reject("poison_offset", "the daemon ended twice while it counted this message", message)
            return
        self.bytes += len(message.payload)
        arrival = self._arrival(message)
        batches: Sequence[AccessBatch | TapCounts] = ()
        try:
            if self.decoder is None:
                batches = decode_message(message.payload, self._max_message_bytes)
            else:
                self.decoder.add(message, arrival)
                self._collected_arrival = max(self._collected_arrival, arrival)
        except CodecError as error:
            self._reject(error.reason, str(error), message)
            return
        except Exception as error:
            _log.exception("ingest: message %s/%d", message.partition, message.offset)
            self._reject("internal_error", repr(error), message)
            return
        if self.decoder is None:
            accesses = self._count(batches, arrival, message.partition)
            for reason in ROW_REASONS:
                if rejected := getattr(accesses, reason):
                    self._dead_letters.record(reason, f"{rejected} accesses of the message", message)
        self.messages += 1

    def flush(self) -> None:
        """Count what the decoder has collected, before positions are saved. Raises as ``count``."""
        if self.decoder is not None and (batches := self.decoder.drain()):
            self._count(batches, self._collected_arrival, "")
            self._collected_arrival = -math.inf

    def _count(self, batches: Sequence[AccessBatch | TapCounts], arrival: float, partition: str) -> AccessCounts:
        for batch in batches:
            skew = batch.event_time_seconds - arrival
            self._window_skew = min(self._window_skew[0], skew), max(self._window_skew[1], skew)
        sketches = self._sketches
        with sketches.lock:
            try:
                fault_point("thread.counting")
                counted = [_ingest(sketches, batch, arrival, partition) for batch in batches]
            except Exception as error:
                # Before the lock is released: nobody may save these counters.
                sketches.damage = error
                raise
        # Without a start value: a message with one batch, the usual one, needs no addition.
        accesses = functools.reduce(operator.add, counted)
        self.accesses += accesses
        return accesses

    def end_window(self, now: float) -> None:
        """End the window of ``skew_seconds`` if it is over; ``now`` is monotonic."""
        if now >= self._window_end:
            least, most = self._window_skew
            self.skew_seconds = (least, most) if least <= most else (math.nan, math.nan)
            self._window_skew, self._window_end = (math.inf, -math.inf), now + SKEW_SECONDS

    def _arrival(self, message: StreamMessage) -> float:
        """Return when a message arrived, Unix seconds: as the broker says, or by the daemon's clock.

        A broker's time of append is used up to the daemon's own: what was appended was appended before now, so a broker
        that is ahead lets nobody date accesses further ahead. Within a partition it never goes back: after a change to
        a broker that is behind, accesses that are dated right are not taken for future ones.
        """
        now = time.time()
        if message.appended_seconds is None:
            return now
        newest = max(message.appended_seconds, self._appended.get(message.partition, -math.inf))
        self._appended[message.partition] = newest
        return min(now, newest)

    def _reject(self, reason: str, detail: str, message: StreamMessage | RefusedMessages, messages: int = 1) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + messages
        self._dead_letters.record(reason, detail, message)
        self.messages += messages


def _ingest(sketches: SketchSet, batch: AccessBatch | TapCounts, arrival: float, partition: str) -> AccessCounts:
    if isinstance(batch, TapCounts):
        return sketches.ingest_tap(batch, arrival)
    return sketches.ingest(
        batch.table, batch.rows, batch.source_rank, batch.event_time_seconds, batch.sequence_lengths, arrival,
        batch.step, batch.sample_ids, batch.user_ids, partition,
    )  # fmt: skip


class RateMeter:
    """Measures rates over the last ``RATE_SECONDS`` from totals that the caller passes in, with monotonic times."""

    def __init__(self, now: float) -> None:
        self.messages_per_second = self.accesses_per_second = 0.0
        self._seen: deque[tuple[float, int, int]] = deque([(now, 0, 0)])

    def update(self, now: float, messages: int, accesses: int) -> None:
        """Update both rates if a second has passed."""
        if now - self._seen[-1][0] < 1.0:
            return
        self._seen.append((now, messages, accesses))
        while self._seen[1][0] <= now - RATE_SECONDS:
            self._seen.popleft()
        since, messages_then, accesses_then = self._seen[0]
        self.messages_per_second = (messages - messages_then) / (now - since)
        self.accesses_per_second = (accesses - accesses_then) / (now - since)


class Ingestor:
    """Source -> decode -> sketches, in one thread that only ``stop`` ends.

    Bad messages and rows are counted by reason and sampled into the dead letters. A source that fails is retried
    with back-off. A snapshot that cannot be written is counted and retried at the next interval; ingest continues.

    The newest usable snapshot is loaded on construction, table by table (``flexd.sketch.restore``); its stream
    positions are restored when the thread starts.

    **Idle streams.** Profiles and queries of a stream that has been read to its end and has had no message for
    ``IDLE_AFTER_SECONDS`` decay by the time since its last message. Only the reading is moved: the counters and their
    clock change with messages alone, so a replay gives the same counters and the next event is not late. An outage
    is not idleness. After a restart the idle time counts from the start of the process.

    Attributes (any thread may read them; counters are those since the process started):
        restored: the state that was continued, and its problems.
        sketches: what was counted. Profiles are read by the methods here: they are of the whole stream, as of now.
        counter: the messages read, by outcome.
        rates: of the last minute.
        snapshots: when and whether counters were saved.
        failures: number of failures by part, ``stream`` or ``snapshots``.
        lag_messages: messages in the stream not read yet, as far as the source knows.

    Args:
        source: owned by the ingestor; closed by the thread when it stops.
        tables, settings: of the sketches.
        store: where state is saved; None saves nothing.
        snapshot_interval_seconds, poll_seconds: as in the configuration.
        max_message_bytes: larger messages are rejected undecoded.
        work: records what is being counted; the source records in the same one what it reads. Closed by the thread.
        decoder: of messages in another format than flexd's own; used by the thread.
        supervisor: of the process; records the faults of the thread.
        unbounded: tables whose ids in the stream are unbounded.
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
        store: SnapshotStore | None,
        *,
        dead_letters: DeadLetterFile | None = None,
        snapshot_interval_seconds: float = 30.0,
        poll_seconds: float = 0.2,
        max_message_bytes: int = 16 * 2**20,
        work: OffsetsInWork | None = None,
        decoder: Decoder | None = None,
        supervisor: Supervisor | None = None,
        unbounded: Collection[str] = (),
        start_empty: bool = False,
    ) -> None:
        self.restored = restore(store, tables, settings, start_empty=start_empty)
        self.source = source
        self.sketches = self.restored.sketches
        self.sketches.id_streams = {table.name: IdStream(table.rows) for table in tables if table.name in unbounded}
        self.snapshots = SnapshotCycle(
            store, snapshot_interval_seconds, source, self.sketches, lambda: self._generation
        )
        self.dead_letters = dead_letters or DeadLetterFile()
        self._work = work or OffsetsInWork()
        self.counter = MessageCounter(self.sketches, self.dead_letters, max_message_bytes, self._work, decoder)
        self.rates = RateMeter(time.monotonic())
        self.failures: Counter[str] = Counter()
        self.lag_messages = 0
        self._lag_at = -math.inf
        # Current problem of each step of the loop that has one: its part, and a word where a part has several.
        self._problems: dict[str, str] = {}
        self._counted_at = time.monotonic()
        # From the first messages on until a poll has none: by then every partition has been seen. None: not begun.
        self._backlog: bool | None = None
        self._unrestored_positions = self.restored.positions
        self._generation = self.restored.generation
        self._generation_lock = threading.Lock()
        self._poll_seconds = poll_seconds
        self._stop = threading.Event()
        supervisor = supervisor or Supervisor()
        self._watch = supervisor.watch("flexd-ingest")
        self._thread = supervisor.thread("flexd-ingest", self._loop, self._stop, self._finish)

    def start(self) -> None:
        """Compile the kernels and start the thread."""
        warm_up(
            {choice.kind for choice in self.sketches.choices()},
            coaccess=self.sketches.coaccess_sample is not None,
            unbounded=bool(self.sketches.id_streams),
        )
        self._thread.start()

    def ids_seen(self) -> dict[str, IdsSeen]:
        """Return what the stream says of the tables of unbounded ids, by name."""
        with self.sketches.lock:
            return {name: stream.seen() for name, stream in self.sketches.id_streams.items()}

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread after a last snapshot. Return True if it ended within the deadline."""
        self._stop.set()
        return self._thread.join(timeout_seconds)

    @property
    def running(self) -> bool:
        """True while the thread is alive."""
        return self._thread.running

    @property
    def idle_seconds(self) -> float:
        """Time by which profiles decay beyond the newest event because the stream is idle."""
        silent = time.monotonic() - self._counted_at
        reading = self._thread.started and self._unrestored_positions is None
        caught_up = reading and self.lag_messages == 0 and not self._problems and self.source.problem is None
        return silent if caught_up and silent >= IDLE_AFTER_SECONDS else 0.0

    def problems(self) -> list[tuple[str, str]]:
        """Return the current problems: (``stream`` or ``snapshots``, text) of each."""
        found = [(step.split()[0], text) for step, text in self._problems.copy().items()]
        unread = self.source.problem
        if unread is not None and "stream" not in dict(found):
            found.append(("stream", unread))
        return found

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
        found = self.sketches.profile(accesses_per_step, generation, self.lag_messages, layout, self.idle_seconds)
        return dataclasses.replace(found, tables=tuple(map(self._scaled, found.tables)))

    def table_profile(self, table: str, layout: RankLayout | None = None) -> TableProfile:
        """Return the present profile of one table (any thread), without numbering it.

        Raises:
            SketchError: unknown table.
        """
        return self._scaled(self.sketches.table_profile(table, layout, self.idle_seconds))

    def _loop(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS)
        while not self._stop.is_set() and not self._attempt("stream", self._restore_positions):
            self._stop.wait(backoff.seconds())
        backoff.reset()
        while not self._stop.is_set():
            fault_point("thread.ingest")
            if self._attempt("stream", self._read_some):
                backoff.reset()
            else:
                self._stop.wait(backoff.seconds())
            if self.snapshots.is_due():
                self._attempt("snapshots copied", self.snapshots.begin)
            if self.snapshots.written:
                self._attempt("snapshots", self.snapshots.finish)
            self.rates.update(time.monotonic(), self.counter.messages, self.counter.accesses.accepted)
            self._watch.progress()
            if self.sketches.damage is not None:
                raise UnsafeStateError(
                    f"the counters may hold a part of a message: {self.sketches.damage!r}",
                    remedy="start the daemon again; it continues from its newest snapshot",
                ) from self.sketches.damage

    def _finish(self) -> None:
        if self.snapshots.pending:
            self._attempt("snapshots", self.snapshots.finish)
        restored = self._unrestored_positions is None
        if restored and self._attempt("snapshots copied", self.snapshots.begin) and self.snapshots.pending:
            self._attempt("snapshots", self.snapshots.finish)
        self._attempt("stream", self.source.close)
        if self.sketches.damage is None:
            self._work.close()

    def _attempt(self, step: str, action: Callable[[], None]) -> bool:
        # Run one step of the loop. Return False if it failed: counted, logged once, and shown as a problem.
        try:
            action()
        except Exception as error:
            self.failures[step.split()[0]] += 1
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
        messages = self.source.poll(self._poll_seconds)
        if messages if self._backlog is None else self._backlog and not messages:
            self._backlog = bool(messages)
            self.sketches.set_backlog(self._backlog)
        if messages:
            count = self.counter.count
            message = messages[0]
            try:
                for message in messages:
                    count(message)
                self.counter.flush()
            except Exception as error:
                # The source has moved past this message, of which an unknown part may be in the counters.
                _log.exception("ingest: message %s/%d", message.partition, message.offset)
                self.sketches.damage = error
                return
            self._work.end()
            self._counted_at = time.monotonic()
        now = time.monotonic()
        self.counter.end_window(now)
        if now >= self._lag_at + 1.0:
            self.sketches.limit_clock(time.time())
            self.lag_messages, self._lag_at = self.source.lag(), now

    def _restore_positions(self) -> None:
        if self._unrestored_positions is not None:
            self.source.restore(self._unrestored_positions)
            self._unrestored_positions = None

    def _scaled(self, table: TableProfile) -> TableProfile:
        return dataclasses.replace(table, weight=table.weight / self.source.read_share)
