"""Choice of the next chunk: one migration at a time, a bounded number of chunks ahead of the slowest rank. No network.

A chunk has a version from the moment it is journalled. It is *outstanding* until all ranks have applied it; when an
epoch ends, the chunks that the ranks have not agreed on are void, and those of a running migration are pushed again
with new versions.

The ranks apply every chunk that all of them hold at their next step boundary, so releasing chunks sets the pace.
Chunks that are released and not yet applied by all ranks are outstanding; any of them, and nothing else, can be applied
at the next step. So the ``Throttle`` bounds the bytes that migrations copy:

- ``bytes_per_step``: outstanding chunks together copy no more than that. Any step of any rank applies a part of them,
  so the cap holds on every rank at every step without further agreement;
- ``bytes_per_second``: a token bucket of ``BURST_SECONDS``, charged when a chunk is released.

A single row may always be released by itself, however large.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from flexd.control.daemon.journal import Chunk, PlacementJournal
from flexd.control.daemon.membership import Topology
from flexd.control.daemon.migration import Migration, MigrationEvent, MigrationState, TransitionEvent
from flexd.core.arrays import Int64Array
from flexd.core.errors import ControlError, FlexdError, IllegalTransitionError
from flexd.core.keyspace import KeySpace
from flexd.core.supervision import fault_point
from flexd.planner.plan import moved_bytes, plan_delta

logger = logging.getLogger(__name__)

CHUNK_ROW_BYTES = 10
"""On the control channel: an int64 key and two uint8 tiers. Rows whose homes change travel as a range."""
MAX_TRIES = 5
"""Epochs in a row in which chunks of a migration may become void before it fails, if no chunk is applied in between."""
_KEPT_DIGESTS = 256
_KEPT_EVENTS = 4096


@dataclass(frozen=True)
class ChunkLimits:
    """Bounds of chunks.

    Attributes:
        window: largest number of chunks pushed but not yet applied by every rank.
        rows, bytes: of one chunk, of which one row is always allowed; bytes are those that it copies.
    """

    window: int = 4
    rows: int = 4096
    bytes: int = 2**20


@dataclass
class _Outstanding:
    chunk: Chunk
    migration: Migration
    copied_bytes: int
    agreed: bool = False


class ChunkPusher:
    """``submit`` and ``next_event`` may be called from any thread; the rest belongs to the coordinator's.

    Args:
        throttle: may hold chunks back or split them; without one, every chunk is released at once.

    Attributes:
        limits: from the next chunk on.
        outstanding: the chunks pushed and not applied by all ranks.
        digests: of the placements at recent versions.
        version: the newest pushed.
        illegal_transitions: transitions that the state table refused; each has raised.
    """

    def __init__(
        self, journal: PlacementJournal, keyspace: KeySpace, limits: ChunkLimits, throttle: Throttle | None = None
    ) -> None:
        self._journal = journal
        self._keyspace = keyspace
        self._throttle = throttle or Throttle()
        self.limits = limits
        self._lock = threading.Lock()
        self._next: Migration | None = None
        # Why no migration can be submitted any more; empty before ``stop``.
        self._stopped = ""
        self._active: Migration | None = None
        self.outstanding: deque[_Outstanding] = deque()
        self.digests: dict[int, int] = {}
        # Epochs since the newest applied chunk whose end has made chunks of the running migration void.
        self._tries = 0
        self._topology: Topology | None = None
        self._applied_version = 0
        # The version agreed when the epoch began. Until it is applied, ranks may hold chunks that are not outstanding
        # here: those of an earlier daemon.
        self._epoch_version = 0
        self._events: deque[MigrationEvent] = deque(maxlen=_KEPT_EVENTS)
        self.illegal_transitions = 0
        self.version = 0
        self.paused = False

    def submit(self, migration: Migration) -> None:
        """Set the next migration; a waiting one is superseded immediately, a running one at its next chunk.

        Raises:
            ControlError: after ``stop``; it would wait for ever.
        """
        with self._lock:
            if self._stopped:
                raise ControlError(self._stopped, remedy="start the daemon again")
            migration.observe(self._events.append)
            older, self._next = self._next, migration
            if older is not None and not older.done:
                self._fire(older, TransitionEvent.SUPERSEDE, f"superseded by plan {migration.record.plan_id}")

    def begin_epoch(self, version: int, digest: int, topology: Topology, reason: str = "") -> None:
        """Void the chunks beyond ``version``: all ranks have agreed on exactly this one and hold no other.

        Rows of a running migration that have become void are pushed again. If they have ``MAX_TRIES`` times without an
        applied chunk in between, it fails.

        Args:
            topology: the ranks.
            reason: why the epoch before ended.
        """
        self._topology = topology
        self.acknowledge(version, 0)
        void = [each for each in self.outstanding if each.chunk.version > version]
        self.outstanding = deque(each for each in self.outstanding if each.chunk.version <= version)
        for each in void:
            rows = len(each.chunk.delta)
            each.migration.count(
                chunks_pushed=-1, rows_pushed=-rows, pushed_bytes=-rows * CHUNK_ROW_BYTES,
                last_version=min(version, each.migration.record.last_version),
            )  # fmt: skip
        self._report_if_settled(*(each.migration for each in void))
        active = self._active
        pushed_again = active is not None and any(each.migration is active for each in void)
        if active is not None and pushed_again and active.state is not MigrationState.ABORTING:
            if active.state is MigrationState.APPLYING:
                self._fire(active, TransitionEvent.VOIDED)
            self._tries += 1
            if self._tries >= MAX_TRIES:
                self.fail_active(
                    f"chunk {version + 1} was pushed {self._tries} times and not all ranks have agreed on it; the last "
                    f"epoch ended: {reason}"
                )
        self.version = self._epoch_version = version
        self.digests = {version: digest}

    def new_generation(self, reason: str) -> None:
        """Fail what was under way: the ranks are others, or their placement is empty."""
        self._applied_version = 0
        self._drop_outstanding(reason)

    def fail_active(self, reason: str) -> None:
        active = self._active
        if active is not None:
            self._fire(active, TransitionEvent.FAIL, reason)
            self._active = None

    def stop(self, reason: str) -> None:
        """Fail the running and the waiting migration; no further chunk is pushed."""
        self._drop_outstanding(reason)
        with self._lock:
            waiting, self._next, self._stopped = self._next, None, reason
        if waiting is not None and not waiting.done:
            self._fire(waiting, TransitionEvent.FAIL, reason)

    def acknowledge(self, agreed_version: int, applied_version: int) -> None:
        """Record that every rank has agreed on and applied at least these versions."""
        for each in self.outstanding:
            each.agreed = each.agreed or each.chunk.version <= max(agreed_version, applied_version)
        self._applied_version = max(self._applied_version, applied_version)
        while self.outstanding and self.outstanding[0].chunk.version <= applied_version:
            each = self.outstanding.popleft()
            each.migration.count(chunks_applied=1, rows_applied=len(each.chunk.delta), copied_bytes=each.copied_bytes)
            self._report_if_settled(each.migration)
            self._tries = 0
            fault_point("chunk.applied")

    def next_chunk(self, generation: int) -> Chunk | None:
        """Return the chunk to push now, journalled and numbered; None if there is none or the window is full."""
        self._advance(generation)
        active = self._active
        if active is None or active.state is not MigrationState.PUSHING or self.paused:
            self._throttle.idle()
            return None
        if len(self.outstanding) >= self.limits.window:
            return None
        try:
            chunk = self._next_of(active)
        except Exception as error:
            self._fail_active_by(error)
            return None
        if active.delta is not None and active.record.rows_pushed == len(active.delta):
            self._fire(active, TransitionEvent.EXHAUSTED)
            self._advance(generation)
        return chunk

    def _next_of(self, active: Migration) -> Chunk | None:
        """Return the next chunk of the running migration; None if the throttle holds it back or there is none."""
        delta, copied, start = active.delta, active.copied, active.record.rows_pushed
        if delta is None or copied is None or start == len(delta):
            return None
        by_bytes = int(np.searchsorted(copied, copied[start] + self.limits.bytes, side="right")) - 1
        end = min(max(by_bytes, start + 1), start + max(1, self.limits.rows), len(delta))
        rows = self._throttle.release(
            np.diff(copied[start : end + 1]),
            sum(each.copied_bytes for each in self.outstanding),
            settled=self._applied_version >= self._epoch_version,
        )
        if rows == 0:
            return None
        chunk = Chunk(self.version + 1, delta.select(slice(start, start + rows)), active.record)
        self._journal.append(chunk)
        self.digests[chunk.version] = (self.digests.get(self.version, 0) + chunk.delta.digest_change()) % 2**64
        while len(self.digests) > _KEPT_DIGESTS:
            del self.digests[next(iter(self.digests))]
        self.version = chunk.version
        self.outstanding.append(_Outstanding(chunk, active, int(copied[start + rows] - copied[start])))
        active.count(chunks_pushed=1, rows_pushed=rows, pushed_bytes=rows * CHUNK_ROW_BYTES, last_version=self.version)
        return chunk

    def next_event(self) -> MigrationEvent | None:
        """Return the oldest event of a migration that was not returned yet; None if there is none. One thread."""
        return self._events.popleft() if self._events else None

    def end_early(self) -> None:
        """Abort and supersede what is due, whether or not there is a chunk to push."""
        with self._lock:
            waiting = self._next
            if waiting is not None and waiting.abort_reason:
                self._next = None
                self._fire(waiting, TransitionEvent.ABORT, waiting.abort_reason)
                waiting = None
        active = self._active
        if active is None:
            return
        if active.abort_reason and active.state in (MigrationState.PUSHING, MigrationState.APPLYING):
            self._fire(active, TransitionEvent.ABORT, active.abort_reason)
        elif active.state is MigrationState.PUSHING and waiting is not None:
            self._fire(active, TransitionEvent.SUPERSEDE, f"superseded by plan {waiting.record.plan_id}")
            self._active = None
        if active.state is MigrationState.ABORTING and self._settled(active):
            self._fire(active, TransitionEvent.STOPPED, self._stop_reason(active))
            self._active = None

    def _advance(self, generation: int) -> None:
        """Make every transition that needs no chunk."""
        self.end_early()
        active = self._active
        if active is not None and active.state is MigrationState.APPLYING and self._settled(active):
            self._fire(active, TransitionEvent.APPLIED)
            self._active = None
        # The next delta is made from a placement that all ranks will certainly reach.
        if self._active is None and all(each.agreed for each in self.outstanding):
            self._start_next(generation)

    def _start_next(self, generation: int) -> None:
        with self._lock:
            migration, self._next = self._next, None
        if migration is None:
            return
        self._active, self._tries = migration, 0
        wanted, topology = migration.record.generation, self._topology
        if topology is None or wanted not in (None, generation):
            self.fail_active(f"planned for topology generation {wanted}, the ranks are at {generation}")
            return
        try:
            self._start(migration, topology)
        except IllegalTransitionError:
            raise
        except Exception as error:
            self._fail_active_by(error)

    def _start(self, migration: Migration, topology: Topology) -> None:
        placement, layout = self._journal.placement_at(self.version), topology.layout
        if not migration.start_from(placement):
            self._fire(migration, TransitionEvent.ABORT, migration.abort_reason)
            self._active = None
            return
        self._fire(migration, TransitionEvent.START)
        fault_point("migration.started")
        plan, target = migration.plan, migration.target
        if plan is not None and target.version == placement.version:
            delta, row_bytes = plan.delta, plan.row_bytes
        else:
            # There is no plan, or an older migration has moved rows since.
            gains = np.ones(len(target)) if plan is None else plan.gains
            read_only = topology.trainer.read_only_tables(self._keyspace.tables) if topology.trainer else ()
            keyspace = KeySpace(self._keyspace.tables, read_only)
            slots = keyspace.room_for_copies(topology.replica_slots)
            delta = plan_delta(placement, target, gains, keyspace, layout, slots)
            row_bytes = moved_bytes(delta, keyspace, layout)
        migration.set_delta(delta, np.concatenate([np.zeros(1, np.int64), np.cumsum(row_bytes)]))

    def _fail_active_by(self, error: Exception) -> None:
        """Fail the running migration: no error in making its chunks ends the daemon."""
        if not isinstance(error, FlexdError):
            logger.error("the chunks of a migration cannot be made", exc_info=error)
        self.fail_active(str(error))

    def _drop_outstanding(self, reason: str) -> None:
        ended = [each.migration for each in self.outstanding if each.migration is not self._active]
        self.outstanding.clear()
        self.fail_active(reason)
        self._report_if_settled(*ended)

    def _settled(self, migration: Migration) -> bool:
        return not any(each.migration is migration for each in self.outstanding)

    @staticmethod
    def _stop_reason(migration: Migration) -> str:
        now = migration.record
        rows = f"{now.rows_applied} of {now.rows} rows" if now.rows else f"{now.rows_applied} rows"
        return f"{migration.abort_reason}: stopped at version {now.last_version or now.base_version}, {rows} applied"

    def _fire(self, migration: Migration, event: TransitionEvent, reason: str = "") -> None:
        try:
            migration.fire(event, reason)
        except IllegalTransitionError:
            # The ranks hold a prefix of its delta in any case; the next migration starts from there.
            self.illegal_transitions += 1
            if migration is self._active:
                self._active = None
            raise
        if migration.done:
            fault_point("migration.finished")
        self._report_if_settled(migration)

    def _report_if_settled(self, *migrations: Migration) -> None:
        for migration in {id(each): each for each in migrations}.values():
            if migration.done and self._settled(migration):
                migration.settle()
                self._events.append(MigrationEvent(migration, None))


BURST_SECONDS = 1.0
"""Capacity of the bucket of ``bytes_per_second``, in seconds of the rate."""
# Largest time between two calls that counts as waiting: without an epoch there are no calls, and nothing is held.
_LONGEST_WAIT_COUNTED = 1.0


class ThrottleReason(StrEnum):
    """The limit that a chunk waits for."""

    STEP = "bytes_per_step"
    SECOND = "bytes_per_second"


@dataclass(frozen=True)
class ThrottleLimits:
    """Limits of the row values and optimizer state copied; None is no limit.

    Attributes:
        bytes_per_step: by one rank at one step boundary.
        bytes_per_second: in the long run.
    """

    bytes_per_step: int | None = None
    bytes_per_second: int | None = None


class Throttle:
    """Thread-safe. The pusher calls ``release`` for every chunk; limits may change at any time.

    Args:
        clock: monotonic seconds.

    Attributes:
        limits: change them by ``set_limits``.
        released_bytes, released_chunks: bytes and chunks released since the start.
        waiting_seconds: time in which a ready chunk was held, by the limit.
        waits_for: the limit that the next chunk waits for now; None if it waits for none.
    """

    def __init__(self, limits: ThrottleLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.limits = limits or ThrottleLimits()
        self._filled_at = clock()
        self._tokens = self._burst
        self.released_bytes = 0
        self.released_chunks = 0
        self.waiting_seconds: dict[ThrottleReason, float] = dict.fromkeys(ThrottleReason, 0.0)
        self.waits_for: ThrottleReason | None = None
        self._looked_at = self._filled_at

    def set_limits(self, limits: ThrottleLimits) -> None:
        """Apply from the next chunk on. Tokens are kept, up to the capacity of the new bucket."""
        with self._lock:
            self._refill()
            before = self.limits.bytes_per_second
            self.limits = limits
            self._tokens = self._burst if before is None else min(self._tokens, self._burst)

    def release(self, row_bytes: Int64Array, outstanding_bytes: int, *, settled: bool = True) -> int:
        """Return how many of a chunk's first rows are released now; 0: none yet.

        Args:
            row_bytes: int64 [n], n >= 1, bytes that each row copies (0: it only drops copies).
            outstanding_bytes: bytes of the chunks released and not yet applied by all ranks.
            settled: False while ranks may hold chunks that are not counted there (an earlier daemon's).
        """
        with self._lock:
            self._refill()
            rows, copied, wait = self._fitting(row_bytes, outstanding_bytes, settled)
            self._account(wait)
            if wait is not None:
                return 0
            self._tokens -= copied
            self.released_bytes += copied
            self.released_chunks += 1
            return rows

    def idle(self) -> None:
        """Record that there is no chunk to release."""
        with self._lock:
            self._account(None)

    def _fitting(
        self, row_bytes: Int64Array, outstanding_bytes: int, settled: bool
    ) -> tuple[int, int, ThrottleReason | None]:
        """Return (rows to release, their bytes, the limit that they wait for)."""
        step, second = self.limits.bytes_per_step, self.limits.bytes_per_second
        ends = np.cumsum(row_bytes)
        rows = len(row_bytes)
        caps = [cap for cap in (step, None if second is None else int(self._burst)) if cap is not None]
        if caps:
            rows = max(1, int(np.searchsorted(ends, min(caps), side="right")))
        copied = int(ends[rows - 1])
        if copied == 0:
            return rows, 0, None
        if step is not None and (not settled or (outstanding_bytes > 0 and outstanding_bytes + copied > step)):
            return 0, 0, ThrottleReason.STEP
        if second is not None and self._tokens < min(copied, self._burst):
            return 0, 0, ThrottleReason.SECOND
        return rows, copied, None

    @property
    def _burst(self) -> float:
        rate = self.limits.bytes_per_second
        return 0.0 if rate is None else max(1.0, rate * BURST_SECONDS)

    def _refill(self) -> None:
        now = self._clock()
        rate = self.limits.bytes_per_second
        if rate is None:
            self._tokens = 0.0
        else:
            self._tokens = min(self._burst, self._tokens + rate * max(0.0, now - self._filled_at))
        self._filled_at = now

    def _account(self, wait: ThrottleReason | None) -> None:
        now = self._clock()
        if self.waits_for is not None:
            self.waiting_seconds[self.waits_for] += min(max(0.0, now - self._looked_at), _LONGEST_WAIT_COUNTED)
        self.waits_for, self._looked_at = wait, now
