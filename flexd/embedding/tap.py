"""``flexd.Tap``: counts accesses on the training device and ships the counts, so that no id leaves it.

Counters take fixed memory; no host waits for the device, and nothing loops over ids. From the distinct rows of a pass
the daemon counts touches. These passes are chosen by their number alone, so all ranks keep the same ones without
agreement: the touches of a row by a node and by anyone are counted from the passes that all ranks have sent. Where a
limit forces a rank to keep fewer, it goes over to a sample that is part of the others'.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from flexd.control.agent.tap_outbox import TapOutbox
from flexd.core.arrays import Int64Array
from flexd.core.errors import ConfigError
from flexd.core.keyspace import KeySpace
from flexd.core.supervision import is_power_of_two
from flexd.core.tap_counts import (
    MAX_VALUES,
    PassRows,
    TableCounts,
    TapCounts,
    TapPasses,
    encode,
    is_sampled,
    merge,
    value_count,
)
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.exchange.route import LookedUpRows

MAX_PARTS = 4096
"""Parts (a table of a pass) in one message: the daemon counts them under a lock, 10 to 50 us each."""
_SPARSEST = 2**20


def max_values(world_size: int) -> int:
    """Return the limit of the ids that a rank holds, so that the daemon can hold the passes of all ranks."""
    return max(2**16, 2**22 // world_size)


class PassSample:
    """The kept passes of one interval.

    Args:
        every: one pass in this many is kept; 0 keeps none.
        limit: of the keys that are held.
    """

    def __init__(self, every: int, keyspace: KeySpace, limit: int) -> None:
        self._asked = self._every = every
        self._keyspace = keyspace
        self._most_passes = max(1, MAX_PARTS // len(keyspace.tables))
        self._limit = limit
        # Number of each pass, its keys and their accesses.
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def wants(self, number: int) -> bool:
        return self._every > 0 and is_sampled(number, self._every)

    def add(self, number: int, keys: torch.Tensor, accesses: torch.Tensor) -> None:
        """Keep int64 [n] keys of a pass, repeats allowed, and int [n] accesses."""
        self._kept.append((number, keys, accesses))
        while sum(len(each[1]) for each in self._kept) > self._limit or len(self._kept) > self._most_passes:
            self._every = sparser(self._every)
            self._kept = [each for each in self._kept if self.wants(each[0])]

    def drain(self) -> list[PassRows]:
        """Return the kept passes and start again with the sample that was asked for. Waits for the device."""
        kept, self._kept, self._every = self._kept, [], self._asked
        return [self._rows_of(*each) for each in kept]

    def _rows_of(self, number: int, keys: torch.Tensor, accesses: torch.Tensor) -> PassRows:
        distinct, place = torch.unique(keys, return_inverse=True)
        totals = torch.zeros_like(distinct).scatter_add_(0, place, accesses.to(torch.int64))
        of_tables = by_table(self._keyspace, distinct.cpu().numpy(), totals.cpu().numpy())
        return PassRows(
            number, tuple(rows for rows, _ in of_tables), tuple(int(of_table.sum()) for _, of_table in of_tables)
        )


def by_table(keyspace: KeySpace, keys: Int64Array, numbers: Int64Array) -> list[tuple[Int64Array, Int64Array]]:
    """Split int64 [n] ascending keys, with a number each, by table: (int64 [m] rows, int64 [m] numbers) of each."""
    firsts = keyspace.first_key
    begins = np.searchsorted(keys, firsts)
    ends = np.searchsorted(keys, firsts + [spec.rows for spec in keyspace.tables])
    return [
        (keys[begin:end] - first, numbers[begin:end])
        for begin, end, first in zip(begins.tolist(), ends.tolist(), firsts.tolist(), strict=True)
    ]


def sparser(every: int) -> int:
    """Return the next sample, a part of this one; 0 after the sparsest."""
    return 2 * every if every < _SPARSEST else 0


def thinned(passes: list[PassRows], limit: int) -> list[PassRows]:
    """Return the passes of the densest sample of at most ``limit`` numbers and ``MAX_PARTS`` parts."""
    every = 1
    while passes and (
        sum(each.values for each in passes) > limit or (sum(len(each.rows) for each in passes) > MAX_PARTS
        and len(passes) > 1)
    ):  # fmt: skip
        every = sparser(every)
        passes = [each for each in passes if is_sampled(each.number, every)] if every else []
    return passes


class RowCounter:
    """One int32 for each row of all tables."""

    def __init__(self, keyspace: KeySpace, device: torch.device) -> None:
        self._keyspace = keyspace
        self._counts = torch.zeros(keyspace.total_rows, dtype=torch.int32, device=device)

    def add(self, keys: torch.Tensor, accesses: torch.Tensor) -> None:
        """Count int32 [n] accesses to int64 [n] keys, repeats allowed."""
        self._counts.scatter_add_(0, keys, accesses)

    def drain(self) -> list[TableCounts]:
        """Return the counts on the host, without tables that have none, and start from zero again. Waits for the
        device."""
        keys = torch.nonzero(self._counts).squeeze(1)
        counts = self._counts[keys].to(torch.int64)
        self._counts.zero_()
        of_tables = by_table(self._keyspace, keys.cpu().numpy(), counts.cpu().numpy())
        return [
            TableCounts(spec.name, rows, of_table)
            for spec, (rows, of_table) in zip(self._keyspace.tables, of_tables, strict=True)
            if len(rows)
        ]


logger = logging.getLogger(__name__)

MAX_BUFFER_ACCESSES = 2**31 - 1
"""Limit of the accesses in one buffer, so that no int32 counter overflows."""
_POLL_SECONDS = 0.1


@dataclass
class TapCounters:
    """Totals since the start of a tap.

    Attributes:
        accesses: accesses that were counted.
        dropped: accesses that were not counted, because both buffers were full (2^31 accesses).
        messages: messages that a snapshot of the daemon holds.
        failures: steps that could not be counted, and buffers that could not be read.
    """

    accesses: int = 0
    dropped: int = 0
    messages: int = 0
    failures: int = 0


class _Buffer:
    """One set of counters, with the event times that it spans."""

    def __init__(self, collection: EmbeddingCollection, touch_steps: int) -> None:
        keyspace = collection.keyspace
        self.rows = RowCounter(keyspace, collection.device)
        self.sample = PassSample(touch_steps, keyspace, max_values(collection.layout.world_size))
        self.accesses = 0
        self.steps = 0
        self.first_seconds = self.last_seconds = 0.0
        self.ready: torch.cuda.Event | None = None

    def record_step(self, seconds: float, accesses: int) -> None:
        if not self.steps:
            self.first_seconds = seconds
        self.last_seconds = seconds
        self.steps += 1
        self.accesses += accesses


class Tap:
    """Counts the rows that a collection looks up for training; pass it to ``flexd.connect``.

    Accesses of forward passes with gradients enabled in training mode are counted. Those of evaluation are not: they
    cost no synchronisation of replicas, which is what a plan weighs. On the device a step costs one ``scatter_add_``
    of the distinct rows that the look-up has found, and never waits. There are two buffers: at the end of an interval
    they change roles, and a thread reads the full one, clears it and hands a message to the agent. While the daemon
    is slow, dead or paused, the counters count on here, in memory bounded by the tables' rows; nothing is lost while
    this process lives.

    Args:
        collection: its look-ups are counted; a collection has at most one tap.
        interval_seconds: how often counts leave the device (the daemon acknowledges at its snapshots, and one message
            is under way at a time, so messages arrive at least ``state.snapshot_interval_seconds`` apart).
        interval_steps: the interval in steps, whichever of the two ends first; None leaves it to the seconds.
        touch_steps: one forward pass in this many (the same ones on all ranks) is sent with its distinct rows, from
            which the daemon counts how often a rank, a node and anyone needs a row; 0 sends none, and plans then
            take look-ups for independent of each other. 1 measures fastest, and sorts every pass on the tap's thread.
        max_bytes: device memory for both buffers, which need 8 bytes for each row of each table.
        clock: event time, Unix seconds; called once per step.

    Raises:
        ConfigError: the tables' counters do not fit ``max_bytes``, an interval is not positive, or the collection has
            a tap.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        *,
        interval_seconds: float = 10.0,
        interval_steps: int | None = None,
        touch_steps: int = 16,
        max_bytes: int = 256 * 2**20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not interval_seconds > 0 or (interval_steps is not None and interval_steps < 1):
            raise ConfigError(
                f"tap: interval of {interval_seconds} s, {interval_steps} steps", remedy="give positive numbers"
            )
        if touch_steps < 0:
            raise ConfigError(f"tap: touch_steps of {touch_steps}", remedy="give 0 (none) or more")
        if collection.after_lookup is not None:
            raise ConfigError("the collection has a tap already", remedy="give each collection one tap")
        needed = sum(8 * spec.rows for spec in collection.keyspace.tables)
        if needed > max_bytes:
            largest = max(collection.keyspace.tables, key=lambda spec: spec.rows)
            raise ConfigError(
                f"tap: counters of all tables need {needed} bytes, the largest part of them table {largest.name!r} "
                f"({largest.rows} rows); max_bytes is {max_bytes}",
                remedy=f"give max_bytes={needed} or more (8 bytes a row of device memory), or publish accesses to a "
                "log and set stream.source to it instead of a tap",
            )
        self.collection = collection
        self.outbox = TapOutbox()
        self._interval_seconds = interval_seconds
        self._interval_steps = interval_steps
        self._clock = clock
        self._counting = _Buffer(collection, touch_steps)
        # None while the thread reads the other buffer.
        self._spare: _Buffer | None = _Buffer(collection, touch_steps)
        self._full: _Buffer | None = None
        self._interval_from = time.monotonic()
        # Counts that are read from the device and not yet in the outbox, by table.
        self._pending: dict[str, TableCounts] = {}
        self._pending_passes: list[PassRows] = []
        self._pass_limit = max_values(collection.layout.world_size)
        # Training passes so far, equal on all ranks.
        self._passes = 0
        self._pending_seconds = (0.0, 0.0)
        self._wake = threading.Event()
        self._stopping = False
        self._counters = TapCounters()
        self._thread = threading.Thread(target=self._run, name=f"flexd-tap-{collection.rank}", daemon=True)
        collection.after_lookup = self._count

    @property
    def counters(self) -> TapCounters:
        return replace(self._counters, messages=self.outbox.acknowledged)

    def start(self) -> None:
        """Start the thread that reads full buffers; ``flexd.connect`` calls it."""
        self._thread.start()

    def close(self, timeout_seconds: float) -> bool:
        """Hand over all counts and wait until a snapshot of the daemon holds them.

        Call it from the training thread, after its last step. Returns False if the deadline passed first.
        """
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

    def _count(self, looked_up: LookedUpRows) -> None:
        """Count one forward pass. Never waits and never raises: a step must not fail because it was not counted."""
        buffer = self._counting
        number = self._passes
        self._passes += 1
        accesses = looked_up.total
        if buffer.accesses + accesses > MAX_BUFFER_ACCESSES:
            self._counters.dropped += accesses
            self._swap()
            return
        try:
            with torch.no_grad():
                keys, of_keys = self._keys_of(looked_up)
                buffer.rows.add(keys, of_keys)
                if buffer.sample.wants(number):
                    buffer.sample.add(number, keys, of_keys)
            buffer.record_step(self._clock(), accesses)
        except Exception:
            self._record_failure("a step was not counted whole")
            return
        self._counters.accesses += accesses
        due = time.monotonic() - self._interval_from >= self._interval_seconds
        due |= self._interval_steps is not None and buffer.steps >= self._interval_steps
        # While counts wait for their turn to be sent, this buffer counts on: nothing has to be read and added up.
        due = due and not self._pending and not self._pending_passes
        if due or buffer.accesses > MAX_BUFFER_ACCESSES // 2:
            self._swap()

    def _keys_of(self, looked_up: LookedUpRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 [n] keys, repeats allowed, and int32 [n] accesses of each."""
        parts = looked_up.addresses
        keys = self.collection.engine.stores[0].homes.keys(parts[0] if len(parts) == 1 else torch.cat(parts))
        if looked_up.accesses is None:
            return keys, torch.ones_like(keys, dtype=torch.int32)
        return keys, looked_up.accesses.to(torch.int32)

    def _swap(self) -> bool:
        """Give the counting buffer to the thread if the spare one is free; else keep counting in this one."""
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

    def _record_failure(self, message: str) -> None:
        self._counters.failures += 1
        if is_power_of_two(self._counters.failures):
            logger.exception("rank %d: tap: %s (%d times)", self.collection.rank, message, self._counters.failures)

    # ---- the tap's thread ----

    def _run(self) -> None:
        while True:
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()
            try:
                full = self._full
                if full is not None:  # the training thread gives no other before this one is read
                    self._full = None
                    self._read(full)
                if (self._pending or self._pending_passes) and self.outbox.free:
                    self._ship()
            except Exception:
                self._record_failure("an interval could not be read")
            if self._stopping and self._full is None:
                return

    def _read(self, full: _Buffer) -> None:
        stream = None
        if full.ready is not None:
            stream = torch.cuda.Stream(self.collection.device)  # type: ignore[no-untyped-call]
            stream.wait_event(full.ready)
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                counts = full.rows.drain()
                passes = full.sample.drain()
            if stream is not None:
                stream.synchronize()
            self._pending_passes = thinned([*self._pending_passes, *passes], self._pass_limit)
            self._add_pending(counts, full.first_seconds, full.last_seconds)
        finally:
            full.accesses = full.steps = 0
            full.ready = None
            self._spare = full

    def _add_pending(self, tables: list[TableCounts], first: float, last: float) -> None:
        if self._pending:
            first, last = min(first, self._pending_seconds[0]), max(last, self._pending_seconds[1])
        self._pending_seconds = (first, last)
        for counts in tables:
            before = self._pending.get(counts.table)
            self._pending[counts.table] = counts if before is None else merge(before, counts)

    def _ship(self) -> None:
        """Put as many pending counts into the outbox as one message holds; the rest waits for the next message."""
        message: list[TableCounts] = []
        rest: dict[str, TableCounts] = {}
        # Counts are never dropped; passes are a sample anyway.
        passes, self._pending_passes = thinned(self._pending_passes, MAX_VALUES // 2), []
        room = MAX_VALUES - sum(each.values for each in passes)
        for name, counts in self._pending.items():
            if value_count([counts]) > room > 2:
                counts, rest[name] = _split(counts, room // 2)
            needed = value_count([counts])
            if needed <= room:
                message.append(counts)
                room -= needed
            else:
                rest[name] = counts
        first, last = self._pending_seconds
        names = tuple(spec.name for spec in self.collection.keyspace.tables)
        sampled = TapPasses(names, tuple(passes)) if passes else TapPasses()
        self.outbox.put(encode(TapCounts(self.collection.rank, (first + last) / 2, tuple(message), sampled)))
        self._pending = rest

    def _wait_until_shipped(self, deadline: float) -> bool:
        while time.monotonic() < deadline and self._thread.is_alive():
            self._wake.set()
            if not self.outbox.wait_until_free(min(0.02, max(0.0, deadline - time.monotonic())), urgent=True):
                continue
            if (
                self._full is None
                and self._spare is not None
                and not (self._pending or self._pending_passes)
                and self.outbox.free
            ):
                return True
        return False


def _split(counts: TableCounts, rows: int) -> tuple[TableCounts, TableCounts]:
    """Return the first ``rows`` rows, and the remaining rows."""
    return (
        TableCounts(counts.table, counts.rows[:rows], counts.counts[:rows]),
        TableCounts(counts.table, counts.rows[rows:], counts.counts[rows:]),
    )
