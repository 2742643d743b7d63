"""Record migrations and actions without touching the disk; a thread writes them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexd.control.daemon.migration_events import MigrationEvent
from flexd.control.daemon.migration_states import MigrationState
from flexd.core.errors import SnapshotError
from flexd.core.fault_points import fault_point
from flexd.core.supervision import Supervisor
from flexd.operations.history.records import (
    ActionRecord,
    EffectRecord,
    Entry,
    HistoryEntry,
    MigrationRecord,
    TransitionRecord,
    VerdictRecord,
)
from flexd.operations.history.store import HistoryStore

MAX_WAITING = 4096
"""Limit of entries that wait to be written; beyond it the oldest are lost."""
RETRY_SECONDS = 5.0
FRESH_SECONDS = 1.0
"""Deadline of a reader for entries recorded before its call to reach the disk."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HistorySnapshot:
    """Counters since the start.

    Attributes:
        entries: entries written.
        lost: entries dropped because too many waited.
        failures: failed writes; they are repeated.
        quarantined: files that could not be used.
        problem: why the newest write failed; None if it succeeded.
    """

    entries: int = 0
    lost: int = 0
    failures: int = 0
    quarantined: int = 0
    problem: str | None = None


class MigrationHistory:
    """The history of migrations and actions. Thread-safe.

    Recording never touches the disk; entries are on disk within milliseconds, or ``flush`` returns False.

    Args:
        path: the SQLite file.
        keep: limit of migrations, and of actions.
        on_event: called with (name, fields) when a file was quarantined; from any thread, must not block.
        supervisor: of the process; records the faults of the thread.
    """

    def __init__(
        self,
        path: Path,
        keep: int,
        on_event: Callable[..., None] | None = None,
        retry_seconds: float = RETRY_SECONDS,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._store = HistoryStore(path, keep, self._quarantine)
        self._on_event = on_event
        self._retry_seconds = retry_seconds
        self._changed = threading.Condition()
        self._waiting: deque[Entry] = deque()
        self._recorded = 0
        self._written = 0
        """Entries of ``_recorded`` that were written or lost."""
        self._entries = self._lost = self._failures = self._aside = 0
        self._problem: str | None = None
        self._stopping = threading.Event()
        self._opened = False
        supervisor = supervisor or Supervisor()
        self._watch = supervisor.watch("flexd-history")
        self._thread = supervisor.thread("flexd-history", self._run, self._stopping, self._store.close)

    def start(self) -> None:
        """Open the file in the background, and retry for as long as it cannot be opened."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Write the waiting entries and end the thread. Returns whether it ended within the deadline."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        return self._thread.join(timeout_seconds)

    @property
    def snapshot(self) -> HistorySnapshot:
        with self._changed:
            return HistorySnapshot(self._entries, self._lost, self._failures, self._aside, self._problem)

    def record_migration(self, news: MigrationEvent) -> None:
        """Record an event of a migration. Called in the coordinator's thread."""
        transition = news.transition
        entry = HistoryEntry(
            MigrationRecord.of(news.migration, settled=transition is None),
            None if transition is None else TransitionRecord.of(transition),
        )
        self._add(entry)

    def record_action(self, action: ActionRecord) -> None:
        """Record an action of a user; from any thread."""
        self._add(action)

    def record_effect(self, effect: EffectRecord) -> None:
        """Record the effect of a migration recorded before; from any thread."""
        self._add(effect)

    def record_verdict(self, verdict: VerdictRecord) -> None:
        """Record the verdict on a migration recorded before; from any thread."""
        self._add(verdict)

    def _add(self, entry: Entry) -> None:
        with self._changed:
            self._recorded += 1
            self._waiting.append(entry)
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self._lost += 1
                self._written += 1
            self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until every entry recorded so far is on disk. Returns False at the deadline or if writing fails."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            wanted = self._recorded
            while self._written < wanted or not self._opened:
                left = deadline - time.monotonic()
                if left <= 0 or self._problem is not None or not self._thread.running:
                    return False
                self._changed.wait(left)
            return True

    def newest(self, limit: int, state: MigrationState | None = None) -> tuple[MigrationRecord, ...]:
        """Return migrations, the newest first. Raises SnapshotError if the file cannot be read."""
        self.flush(FRESH_SECONDS)
        return self._store.newest(limit, state)

    def find(self, migration_id: str) -> tuple[MigrationRecord, tuple[TransitionRecord, ...]] | None:
        """Return a migration and its transitions, or None. Raises SnapshotError if the file cannot be read."""
        self.flush(FRESH_SECONDS)
        return self._store.find(migration_id)

    def newest_actions(self, limit: int) -> tuple[ActionRecord, ...]:
        """Return actions, the newest first. Raises SnapshotError if the file cannot be read."""
        self.flush(FRESH_SECONDS)
        return self._store.newest_actions(limit)

    def effects(self, migration_ids: Sequence[str]) -> dict[str, EffectRecord]:
        """Return the kept effects by migration. Raises SnapshotError if the file cannot be read."""
        self.flush(FRESH_SECONDS)
        return self._store.effects(migration_ids)

    def verdicts(self, migration_ids: Sequence[str]) -> dict[str, VerdictRecord]:
        """Return the kept verdicts by migration. Raises SnapshotError if the file cannot be read."""
        self.flush(FRESH_SECONDS)
        return self._store.verdicts(migration_ids)

    def newest_verdict(self) -> VerdictRecord | None:
        """Return the newest kept verdict, without waiting for the file. Raises SnapshotError if it cannot be read."""
        return self._store.newest_verdict()

    def _run(self) -> None:
        if self._attempt([]):
            self._watch.progress()
        while (entries := self._due()) is not None:
            written = False
            try:
                written = self._attempt(entries)
            finally:
                if not written:
                    self._put_back(entries)
            with self._changed:
                self._entries += written * len(entries)
                self._written += written * len(entries)
                self._changed.notify_all()
            self._watch.progress()

    def _due(self) -> list[Entry] | None:
        """Wait for entries and a usable file, and return the entries; None to end."""
        with self._changed:
            retry_at = time.monotonic() + self._retry_seconds if self._problem else 0.0
            while not self._stopping.is_set():
                left = retry_at - time.monotonic()
                if self._waiting and left <= 0:
                    break
                self._changed.wait(left if self._waiting or left > 0 else None)
            if not self._waiting or (self._stopping.is_set() and self._problem is not None):
                return None
            entries = list(self._waiting)
            self._waiting.clear()
            return entries

    def _attempt(self, entries: list[Entry]) -> bool:
        try:
            fault_point("thread.history")
            self._store.open()
            if entries:
                self._store.write(entries)
        except SnapshotError as error:
            with self._changed:
                self._failures += 1
                first = self._problem is None
                self._problem = str(error)
                self._changed.notify_all()
            logger.log(logging.ERROR if first else logging.DEBUG, "%s", error)
            return False
        with self._changed:
            self._problem, self._opened = None, True
            self._changed.notify_all()
        return True

    def _put_back(self, entries: list[Entry]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(entries))
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self._lost += 1
                self._written += 1

    def _quarantine(self, reason: str) -> None:
        with self._changed:
            self._aside += 1
        logger.error("unusable migration history (%s): it is kept as *.unusable, and a new one is begun", reason)
        if self._on_event is not None:
            self._on_event("history_quarantined", {"reason": reason})
