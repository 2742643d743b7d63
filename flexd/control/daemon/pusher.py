"""Choice of the next chunk: one migration at a time, a bounded number of chunks ahead of the slowest rank. No network.

A chunk has a version from the moment it is journalled. It is *outstanding* until all ranks have applied it; when an
epoch ends, the chunks that the ranks have not agreed on are void, and those of a running migration are pushed again
with new versions.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.control.daemon.event_log import MigrationEvent
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.journal_frames import JournalledMigration
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import Transition
from flexd.control.daemon.migration_states import MigrationState, TransitionEvent
from flexd.control.daemon.throttle import Throttle
from flexd.core.errors import FlexdError, IllegalTransitionError, PlacementError
from flexd.core.fault_points import fault_point
from flexd.core.placement import Delta

logger = logging.getLogger(__name__)

CHUNK_ROW_BYTES = 10
"""On the control channel: an int64 key and two uint8 tiers. Rows whose homes change travel as a range."""
MAX_TRIES = 5
"""Epochs in a row in which chunks of a migration may become void before it fails, if no chunk is applied in between."""
_KEPT_DIGESTS = 256
_KEPT_EVENTS = 4096

RowBytes = Callable[[Delta], npt.NDArray[np.int64]]
"""A delta of n rows -> int64 [n]: bytes of values and optimizer state that each row's change copies."""


def _no_bytes(delta: Delta) -> npt.NDArray[np.int64]:
    return np.zeros(len(delta), dtype=np.int64)


@dataclass(frozen=True)
class NumberedChunk:
    version: int
    plan_id: str
    delta: Delta


@dataclass
class _Outstanding:
    version: int
    delta: Delta
    migration: Migration
    copied_bytes: int
    agreed: bool = False


class ChunkPusher:
    """``submit``, ``pause`` and ``resume`` may be called from any thread; the rest belongs to the coordinator's.

    Args:
        window_chunks: largest number of chunks pushed but not yet applied by every rank.
        max_chunk_rows: a larger chunk fails its migration.
        throttle: may hold chunks back or split them; without one, every chunk is released at once.
        row_bytes: bytes that the throttle counts for each row.

    Attributes:
        illegal_transitions: transitions that the state table refused; each has raised.
    """

    def __init__(
        self,
        journal: PlacementJournal,
        window_chunks: int,
        max_chunk_rows: int,
        throttle: Throttle | None = None,
        row_bytes: RowBytes = _no_bytes,
    ) -> None:
        self._journal = journal
        self._throttle = throttle or Throttle()
        self._row_bytes = row_bytes
        self._window = window_chunks
        self._max_rows = max_chunk_rows
        self._lock = threading.Lock()
        self._next: Migration | None = None
        self._active: Migration | None = None
        self._outstanding: deque[_Outstanding] = deque()
        self._repush: deque[Delta] = deque()
        self._digests: dict[int, int] = {}
        self._tries = 0
        """Epochs since the newest applied chunk whose end has made chunks of the running migration void."""
        self._applied_version = 0
        self._epoch_version = 0
        """The version agreed when the epoch began. Until it is applied, ranks may hold chunks that are not outstanding
        here: those of an earlier daemon."""
        self._events: deque[MigrationEvent] = deque(maxlen=_KEPT_EVENTS)
        self.illegal_transitions = 0
        self.version = 0
        """The newest version pushed."""
        self.paused = False

    @property
    def outstanding_chunks(self) -> int:
        return len(self._outstanding)

    def submit(self, migration: Migration) -> None:
        """Set the next migration; a waiting one is superseded immediately, a running one at its next chunk."""
        with self._lock:
            migration.observe(self._record_transition)
            older, self._next = self._next, migration
            if older is not None and not older.done:
                self._fire(older, TransitionEvent.SUPERSEDE, f"superseded by plan {migration.plan_id}")

    def begin_epoch(self, version: int, digest: int, reason: str = "") -> None:
        """Void the chunks beyond ``version``: all ranks have agreed on exactly this one and hold no other.

        A migration whose chunks have become void ``MAX_TRIES`` times without an applied chunk in between fails.

        Args:
            reason: why the epoch before ended.
        """
        self.acknowledge(version, 0)
        void = [chunk for chunk in self._outstanding if chunk.version > version]
        self._outstanding = deque(chunk for chunk in self._outstanding if chunk.version <= version)
        for chunk in void:
            chunk.migration.count(
                chunks_pushed=-1, rows_pushed=-len(chunk.delta), pushed_bytes=-len(chunk.delta.keys) * CHUNK_ROW_BYTES,
                last_version=min(version, chunk.migration.record.last_version),
            )  # fmt: skip
        self._report_if_settled(*(chunk.migration for chunk in void))
        active = self._active
        repush = [chunk.delta for chunk in void if chunk.migration is active]
        if active is not None and repush and active.state is not MigrationState.ABORTING:
            self._repush.extendleft(reversed(repush))
            if active.state is MigrationState.APPLYING:
                self._fire(active, TransitionEvent.VOIDED)
            self._tries += 1
            if self._tries >= MAX_TRIES:
                self.fail_active(
                    f"chunk {version + 1} was pushed {self._tries} times and not all ranks have agreed on it; the last "
                    f"epoch ended: {reason}"
                )
        self.version = self._epoch_version = version
        self._digests = {version: digest}

    def new_generation(self, reason: str) -> None:
        """Fail what was under way: the ranks are others, or their placement is empty."""
        self._applied_version = 0
        self._drop_outstanding(reason)

    def fail_active(self, reason: str) -> None:
        active = self._active
        if active is not None:
            self._fire(active, TransitionEvent.FAIL, reason)
            self._drop_active()

    def stop(self, reason: str) -> None:
        """Fail the running and the waiting migration; no further chunk is pushed."""
        self._drop_outstanding(reason)
        with self._lock:
            waiting, self._next = self._next, None
        if waiting is not None and not waiting.done:
            self._fire(waiting, TransitionEvent.FAIL, reason)

    def acknowledge(self, agreed_version: int, applied_version: int) -> None:
        """Record that every rank has agreed on and applied at least these versions."""
        for chunk in self._outstanding:
            if not chunk.agreed and chunk.version <= max(agreed_version, applied_version):
                chunk.agreed = True
                chunk.migration.count(rows_agreed=len(chunk.delta))
        self._applied_version = max(self._applied_version, applied_version)
        while self._outstanding and self._outstanding[0].version <= applied_version:
            chunk = self._outstanding.popleft()
            chunk.migration.count(chunks_applied=1, rows_applied=len(chunk.delta), copied_bytes=chunk.copied_bytes)
            self._report_if_settled(chunk.migration)
            self._tries = 0
            fault_point("chunk.applied")

    def next_chunk(self, generation: int) -> NumberedChunk | None:
        """Return the chunk to push now, journalled and numbered; None if there is none or the window is full."""
        self._advance(generation)
        active = self._active
        if active is None or active.state is not MigrationState.PUSHING or self.paused:
            self._throttle.idle()
            return None
        if len(self._outstanding) >= self._window:
            return None
        try:
            delta = self._repush.popleft() if self._repush else active.next_chunk()
            if delta is None:
                self._fire(active, TransitionEvent.EXHAUSTED)
                self._advance(generation)
                return None
            if len(delta) > self._max_rows:
                raise PlacementError(
                    f"a chunk of {len(delta)} rows",
                    remedy=f"split the delta into chunks of at most {self._max_rows} rows",
                )
            copied = self._row_bytes(delta)
            rows = self._throttle.release(
                copied,
                sum(chunk.copied_bytes for chunk in self._outstanding),
                settled=self._applied_version >= self._epoch_version,
            )
            if rows < len(delta):
                self._repush.appendleft(delta.select(slice(rows, None)))
            if rows == 0:
                return None
            delta, copied = delta.select(slice(0, rows)), copied[:rows]
            self._journal.append(
                self.version + 1,
                delta,
                JournalledMigration(active.migration_id, active.plan_id, active.record.base_version, active.returns_to),
            )
        except IllegalTransitionError:
            raise
        except Exception as error:
            # The chunk source is the caller's code: any exception fails this migration, not the daemon.
            if not isinstance(error, FlexdError):
                logger.exception("migration %s: its chunks cannot be made", active.plan_id)
            self.fail_active(str(error))
            return None
        self._digests[self.version + 1] = (self._digests.get(self.version, 0) + delta.digest_change()) % 2**64
        while len(self._digests) > _KEPT_DIGESTS:
            del self._digests[next(iter(self._digests))]
        self.version += 1
        self._outstanding.append(_Outstanding(self.version, delta, active, int(copied.sum())))
        active.count(
            chunks_pushed=1, rows_pushed=len(delta), pushed_bytes=len(delta.keys) * CHUNK_ROW_BYTES,
            last_version=self.version,
        )  # fmt: skip
        return NumberedChunk(self.version, active.plan_id, delta)

    def digest_at(self, version: int) -> int | None:
        """Return the digest of the placement at a recent version; None if it is no longer stored."""
        return self._digests.get(version)

    def drain_events(self) -> list[MigrationEvent]:
        """Return the events of all migrations since the last call, in order."""
        events: list[MigrationEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

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
            self._repush.clear()
            self._fire(active, TransitionEvent.ABORT, active.abort_reason)
        elif active.state is MigrationState.PUSHING and waiting is not None:
            self._fire(active, TransitionEvent.SUPERSEDE, f"superseded by plan {waiting.plan_id}")
            self._drop_active()
        if active.state is MigrationState.ABORTING and self._settled(active):
            self._fire(active, TransitionEvent.STOPPED, self._stop_reason(active))
            self._drop_active()

    def _advance(self, generation: int) -> None:
        """Make every transition that needs no chunk."""
        self.end_early()
        active = self._active
        if active is not None and active.state is MigrationState.APPLYING and self._settled(active):
            self._fire(active, TransitionEvent.APPLIED)
            self._drop_active()
        # The next delta is made from a placement that all ranks will certainly reach.
        if self._active is None and all(chunk.agreed for chunk in self._outstanding):
            self._start_next(generation)

    def _start_next(self, generation: int) -> None:
        with self._lock:
            migration, self._next = self._next, None
        if migration is None:
            return
        self._active = migration
        if migration.generation is not None and migration.generation != generation:
            self.fail_active(f"planned for topology generation {migration.generation}, the ranks are at {generation}")
            return
        self._fire(migration, TransitionEvent.START)
        fault_point("migration.started")
        try:
            migration.begin(self._journal.placement_at(self.version))
        except Exception as error:
            if not isinstance(error, FlexdError):
                logger.exception("migration %s: its chunks cannot be made", migration.plan_id)
            self.fail_active(str(error))

    def _drop_outstanding(self, reason: str) -> None:
        ended = [chunk.migration for chunk in self._outstanding if chunk.migration is not self._active]
        self._outstanding.clear()
        self.fail_active(reason)
        self._report_if_settled(*ended)

    def _settled(self, migration: Migration) -> bool:
        return not any(chunk.migration is migration for chunk in self._outstanding)

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
                self._drop_active()
            raise
        if migration.done:
            fault_point("migration.finished")
        self._report_if_settled(migration)

    def _record_transition(self, migration: Migration, transition: Transition) -> None:
        self._events.append(MigrationEvent(migration, transition))

    def _report_if_settled(self, *migrations: Migration) -> None:
        for migration in {id(each): each for each in migrations}.values():
            if migration.done and self._settled(migration):
                migration.settle()
                self._events.append(MigrationEvent(migration, None))

    def _drop_active(self) -> None:
        self._active = None
        self._tries = 0
        self._repush.clear()
