"""``flexd.Tap``: counts accesses on the training device and ships the counts, so that no id leaves it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from flexd.control.agent.tap_outbox import TapOutbox
from flexd.core.counted_accesses import MAX_VALUES, CountedBatch, RowCounts, TableCounts, encode, fold, values_of
from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.jagged import Jagged
from flexd.embedding.tap.counters import CellTap, DenseTap, TapChoice, choose

logger = logging.getLogger(__name__)

MAX_SIDE_ACCESSES = 2**31 - 1
"""Of one buffer: no int32 counter can have passed its range."""
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class TapCounters:
    """Since the start.

    Attributes:
        accesses: counted. dropped: not counted, because both buffers were full (2^31 accesses).
        intervals: taken from the device. deltas, bytes: that the daemon has for good.
        failures: steps that could not be counted, and intervals that could not be read.
    """

    accesses: int
    dropped: int
    intervals: int
    deltas: int
    bytes: int
    failures: int


class _Side:
    """One of the two buffers, with the event times that it spans."""

    def __init__(self, tap: Tap) -> None:
        collection = tap.collection
        self.tables = [
            DenseTap(spec, collection.device)
            if choice.log2_width is None
            else CellTap(spec, choice.log2_width, tap.sampled, collection.device)
            for spec, choice in zip(collection.keyspace.tables, tap.choices, strict=True)
        ]
        self.accesses = 0
        self.steps = 0
        self.first_seconds = self.last_seconds = 0.0
        self.ready: torch.cuda.Event | None = None

    def note(self, seconds: float, accesses: int) -> None:
        if not self.steps:
            self.first_seconds = seconds
        self.last_seconds = seconds
        self.steps += 1
        self.accesses += accesses


class Tap:
    """Counts what a collection looks up for training; pass it to ``flexd.connect``.

    Accesses of forward passes with gradients enabled in training mode are counted, those of evaluation are not: they
    cost no synchronisation of replicas, which is what a plan weighs. On the device a step costs a ``scatter_add_`` a
    feature (more for count-min tables) and never waits. There are two buffers: at the end of an interval they change
    roles, and a thread reads the full one, clears it and hands a delta to the agent. While the daemon is slow, dead or
    paused, intervals are added up here, in memory bounded by the tables' rows; nothing is lost while this process
    lives.

    Args:
        collection: whose look-ups to count; one tap each.
        interval_seconds: how often counts leave the device (the daemon acknowledges at its snapshots, and one delta is
            under way at a time, so what it receives is at least ``state.snapshot_interval_seconds`` apart).
        interval_steps: the same in steps, whichever comes first; None leaves it to the seconds.
        max_bytes: device memory for both buffers: exact counters (8 bytes a row) as far as they fit, smallest tables
            first; 4 x 2^k count-min cells for the others.
        sampled: accesses sampled an interval from each count-min table.
        clock: event time, Unix seconds; called once a step.

    Raises:
        EmbeddingError: ``max_bytes`` is too small, an interval is not positive, or the collection has a tap.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        *,
        interval_seconds: float = 10.0,
        interval_steps: int | None = None,
        max_bytes: int = 256 * 2**20,
        sampled: int = 16_384,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not interval_seconds > 0 or (interval_steps is not None and interval_steps < 1):
            raise EmbeddingError(
                f"tap: interval of {interval_seconds} s, {interval_steps} steps", remedy="give positive numbers"
            )
        if not 1 <= sampled <= 2**20:
            raise EmbeddingError(f"tap: {sampled} sampled accesses", remedy="sample 1 to 2^20")
        if collection.after_lookup is not None:
            raise EmbeddingError("the collection has a tap already", remedy="give each collection one tap")
        self.collection = collection
        self.sampled = sampled
        self.choices: tuple[TapChoice, ...] = choose(collection.keyspace.tables, max_bytes, sampled)
        self.outbox = TapOutbox()
        self._interval_seconds = interval_seconds
        self._interval_steps = interval_steps
        self._clock = clock
        self._table_of = collection.table_of_feature
        self._counting = _Side(self)
        self._spare: _Side | None = _Side(self)
        """None while the thread reads the other buffer."""
        self._full: _Side | None = None
        self._interval_from = time.monotonic()
        self._held: dict[str, TableCounts] = {}
        self._held_seconds = (0.0, 0.0)
        self._random = np.random.default_rng([collection.rank, 0x7A9])
        self._wake = threading.Event()
        self._stopping = False
        self._accesses = self._dropped = self._intervals = self._failures = 0
        self._thread = threading.Thread(target=self._run, name=f"flexd-tap-{collection.rank}", daemon=True)
        collection.after_lookup = self._count

    @property
    def counters(self) -> TapCounters:
        outbox = self.outbox
        return TapCounters(
            self._accesses, self._dropped, self._intervals, outbox.acknowledged, outbox.acknowledged_bytes,
            self._failures,
        )  # fmt: skip

    def start(self) -> None:
        """Starts the thread that reads full buffers; ``flexd.connect`` does it."""
        self._thread.start()

    def close(self, timeout_seconds: float) -> bool:
        """From the training thread, after its last step: hands over what is counted and waits until the daemon has
        all of it in a snapshot. False if that took longer than the deadline."""
        deadline = time.monotonic() + timeout_seconds
        self.collection.after_lookup = None
        while self._counting.steps and not self._swap() and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.005)
        done = self._counting.steps == 0 and self._wait_until_shipped(deadline)
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return done

    # ---- the training thread ----

    def _count(self, features: Mapping[str, Jagged]) -> None:
        """Never waits and never raises: a step must not fail because it could not be counted."""
        side = self._counting
        accesses = sum(jagged.values.shape[0] for jagged in features.values())
        if side.accesses + accesses > MAX_SIDE_ACCESSES:
            self._dropped += accesses
            self._swap()
            return
        try:
            with torch.no_grad():
                for name, jagged in features.items():
                    side.tables[self._table_of[name]].add(jagged.values, jagged.lengths)
            side.note(self._clock(), accesses)
        except Exception:
            self._fail("a step was not counted whole")
            return
        self._accesses += accesses
        due = time.monotonic() - self._interval_from >= self._interval_seconds
        due |= self._interval_steps is not None and side.steps >= self._interval_steps
        if due or side.accesses > MAX_SIDE_ACCESSES // 2:
            self._swap()

    def _swap(self) -> bool:
        """Lets the thread have the buffer, if it is done with the other; counting goes on in this one if not."""
        spare, full = self._spare, self._counting
        if spare is None:
            return False
        if self.collection.device.type == "cuda":
            full.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            full.ready.record()
        self._counting, self._spare = spare, None
        self._interval_from = time.monotonic()
        self._full = full
        self._wake.set()
        return True

    def _fail(self, what: str) -> None:
        self._failures += 1
        # Powers of two keep the log bounded.
        if self._failures & (self._failures - 1) == 0:
            logger.exception("rank %d: tap: %s (%d times)", self.collection.rank, what, self._failures)

    # ---- the tap's thread ----

    def _run(self) -> None:
        while True:
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()
            try:
                full, self._full = self._full, None
                if full is not None:
                    self._read(full)
                if self._held and self.outbox.free:
                    self._ship()
            except Exception:
                self._fail("an interval could not be read")
            if self._stopping and self._full is None:
                return

    def _read(self, full: _Side) -> None:
        stream = None
        if full.ready is not None:
            stream = torch.cuda.Stream(self.collection.device)  # type: ignore[no-untyped-call]
            stream.wait_event(full.ready)
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                found = [table.take() for table in full.tables]
            if stream is not None:
                stream.synchronize()
            self._hold([counts for counts in found if counts.accesses], full.first_seconds, full.last_seconds)
            self._intervals += 1
        finally:
            full.accesses = full.steps = 0
            full.ready = None
            self._spare = full

    def _hold(self, found: list[TableCounts], first: float, last: float) -> None:
        if self._held:
            first, last = min(first, self._held_seconds[0]), max(last, self._held_seconds[1])
        self._held_seconds = (first, last)
        for counts in found:
            before = self._held.get(counts.table)
            self._held[counts.table] = counts if before is None else fold(before, counts, self.sampled, self._random)

    def _ship(self) -> None:
        """As much of what is held as one message takes; the rest goes with the next."""
        parts: list[TableCounts] = []
        left: dict[str, TableCounts] = {}
        room = MAX_VALUES
        for name, counts in self._held.items():
            needed = values_of([counts])
            if isinstance(counts, RowCounts) and needed > room > 2 * len(counts.lengths.lengths) + 2:
                counts, rest = _split(counts, (room - 2 * len(counts.lengths.lengths)) // 2)
                left[name] = rest
                needed = values_of([counts])
            if needed <= room:
                parts.append(counts)
                room -= needed
            else:
                left[name] = counts
        first, last = self._held_seconds
        self.outbox.put(encode(CountedBatch(self.collection.rank, (first + last) / 2, tuple(parts))))
        self._held = left

    def _wait_until_shipped(self, deadline: float) -> bool:
        while time.monotonic() < deadline and self._thread.is_alive():
            self._wake.set()
            if not self.outbox.wait_until_free(min(0.02, max(0.0, deadline - time.monotonic())), urgent=True):
                continue
            if self._full is None and self._spare is not None and not self._held and self.outbox.free:
                return True
        return False


def _split(counts: RowCounts, rows: int) -> tuple[RowCounts, RowCounts]:
    """The first so many rows, with the lengths, and the rest."""
    none = counts.lengths.none()
    return (
        RowCounts(counts.table, counts.rows[:rows], counts.counts[:rows], counts.lengths),
        RowCounts(counts.table, counts.rows[rows:], counts.counts[rows:], none),
    )
