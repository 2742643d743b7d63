"""The history of migrations, with their verifications, and of users' actions: recorded without touching the disk,
written by a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Literal

from flexd.control.daemon.migration import (
    FINAL_STATES,
    ActionRecord,
    MigrationRecord,
    MigrationState,
    Transition,
    TransitionEvent,
    VerificationReport,
)
from flexd.core.errors import SnapshotError
from flexd.core.supervision import Supervisor, fault_point
from flexd.operations.decisions import StateDatabase, Statement

MAX_WAITING = 4096
"""Limit of entries that wait to be written; beyond it the oldest are lost."""
RETRY_SECONDS = 5.0
FRESH_SECONDS = 1.0
"""Deadline of a reader for entries recorded before its call to reach the disk."""
ENDED_UNSEEN = "the daemon ended while it was unfinished"
MAX_DETAIL_CHARACTERS = 2_000

ActionKind = Literal["pause", "resume", "throttle", "reload", "override", "withhold", "verify"]

logger = logging.getLogger(__name__)


_VERIFICATION = {"verification"}
"""Field of a migration that is recorded after its end, by itself."""
_UPSERT = (
    "INSERT INTO migrations (id, document) VALUES (?, ?) "
    "ON CONFLICT (id) DO UPDATE SET document = json_patch(document, excluded.document)"
)
_ADD = "UPDATE migrations SET document = json_patch(document, ?) WHERE id = ?"
"""Of a migration that is not kept any more nothing is written."""


class MigrationHistory:
    """The history of migrations and actions. Thread-safe.

    Recording never touches the disk; entries are on disk within milliseconds, or ``flush`` returns False. Migrations
    that a crash left unfinished are recorded as failed.

    Args:
        file: the state; the caller closes it after ``stop``.
        keep: limit of migrations, and of actions.
        supervisor: of the process; records the faults of the thread.

    Attributes:
        entries, lost, failures: entries written, and dropped because too many waited, and failed writes (they are
            repeated), since the start.
        problem: why the newest write failed; None if it succeeded.

    Raises:
        StateVersionError: a newer flexd wrote the file; it is unchanged.
        SnapshotError: the file cannot be read.
    """

    def __init__(
        self,
        file: StateDatabase,
        keep: int,
        retry_seconds: float = RETRY_SECONDS,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._file = file
        self._keep = keep
        self._retry_seconds = retry_seconds
        self._changed = threading.Condition()
        self._waiting: deque[Statement] = deque()
        self._recorded = 0
        self._written = 0
        """Entries of ``_recorded`` that were written or lost."""
        self.entries = self.lost = self.failures = 0
        self.problem: str | None = None
        self._stopping = threading.Event()
        supervisor = supervisor or Supervisor()
        self._watch = supervisor.watch("flexd-history")
        self._thread = supervisor.thread("flexd-history", self._run, self._stopping)
        self._fail_unfinished()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Write the waiting entries and end the thread. Returns whether it ended within the deadline."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        return self._thread.join(timeout_seconds)

    def record_migration(self, record: MigrationRecord) -> None:
        """Record a migration as it is now; from any thread."""
        self._add(_UPSERT, record.migration_id, record.model_dump_json(exclude=_VERIFICATION))

    def record_action(self, kind: ActionKind, requested_by: str, reason: str, detail: str = "") -> None:
        """Record an action that is no migration, now; from any thread. A long ``detail`` is truncated."""
        action = ActionRecord(
            unix_seconds=time.time(),
            kind=kind,
            requested_by=requested_by,
            reason=reason,
            detail=detail[:MAX_DETAIL_CHARACTERS],
        )
        self._add("INSERT INTO actions (document) VALUES (?)", action.model_dump_json())

    def record_verification(self, found: VerificationReport) -> None:
        """Record the verification of a migration recorded before; from any thread."""
        record = MigrationRecord(migration_id=found.migration_id, verification=found)
        self._add(_ADD, record.model_dump_json(include=_VERIFICATION), found.migration_id)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until every entry recorded so far is on disk. Returns False at the deadline or if writing fails."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            wanted = self._recorded
            while self._written < wanted:
                left = deadline - time.monotonic()
                if left <= 0 or self.problem is not None or not self._thread.running:
                    return False
                self._changed.wait(left)
            return True

    def newest(self, limit: int, state: MigrationState | None = None) -> tuple[MigrationRecord, ...]:
        """Return migrations, the newest first. Raises SnapshotError if the file cannot be read."""
        if state is None:
            return self._select("ORDER BY serial DESC LIMIT ?", limit)
        return self._select("WHERE document ->> 'state' = ? ORDER BY serial DESC LIMIT ?", state.value, limit)

    def newest_moves(self, limit: int) -> tuple[MigrationRecord, ...]:
        """Return migrations that pushed a chunk, the newest first. Raises SnapshotError as ``newest``."""
        return self._select("WHERE document ->> 'chunks_pushed' > 0 ORDER BY serial DESC LIMIT ?", limit)

    def newest_verification(self) -> VerificationReport | None:
        """Return that of the newest migration that has one. Raises SnapshotError as ``newest``."""
        found = self._select("WHERE document -> 'verification' IS NOT NULL ORDER BY serial DESC LIMIT 1")
        return found[0].verification if found else None

    def find(self, migration_id: str) -> MigrationRecord | None:
        """Return a migration; None if it is not kept. Raises SnapshotError as ``newest``."""
        return next(iter(self._select("WHERE id = ?", migration_id)), None)

    def newest_actions(self, limit: int) -> tuple[ActionRecord, ...]:
        """Return actions, the newest first. Raises SnapshotError if the file cannot be read."""
        self.flush(FRESH_SECONDS)
        rows = self._file.read("SELECT document FROM actions ORDER BY serial DESC LIMIT ?", limit)
        return tuple(ActionRecord.model_validate_json(document) for (document,) in rows)

    def _select(self, clause: str, *values: object) -> tuple[MigrationRecord, ...]:
        self.flush(FRESH_SECONDS)
        rows = self._file.read(f"SELECT document FROM migrations {clause}", *values)
        try:
            return tuple(MigrationRecord.model_validate_json(document) for (document,) in rows)
        except ValueError as error:
            raise SnapshotError(f"a migration of the history cannot be read: {error}") from error

    def _fail_unfinished(self) -> None:
        for record in self._select("WHERE document ->> 'settled' = 0"):
            if record.state not in FINAL_STATES:
                number = record.transitions[-1].number + 1 if record.transitions else 0
                failed = Transition(
                    number=number, unix_seconds=time.time(), event=TransitionEvent.FAIL, before=record.state,
                    after=MigrationState.FAILED, reason=ENDED_UNSEEN, rows_pushed=record.rows_pushed,
                    rows_applied=record.rows_applied, version=record.last_version,
                )  # fmt: skip
                changes = {
                    "state": failed.after, "problem": failed.reason, "ended_unix_seconds": failed.unix_seconds,
                    "transitions": (*record.transitions, failed),
                }  # fmt: skip
                record = record.model_copy(update=changes)
            self.record_migration(record.model_copy(update={"settled": True}))

    def _add(self, statement: str, *values: object) -> None:
        with self._changed:
            self._recorded += 1
            self._waiting.append((statement, values))
            self._drop_too_many()
            self._changed.notify_all()

    def _drop_too_many(self) -> None:
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._written += 1
            self.lost += 1

    def _run(self) -> None:
        if self._write([]):
            self._watch.progress()
        while (entries := self._due()) is not None:
            written = False
            try:
                written = self._write(entries)
            finally:
                with self._changed:
                    if written:
                        self._written += len(entries)
                        self.entries += len(entries)
                    else:
                        self._waiting.extendleft(reversed(entries))
                        self._drop_too_many()
                    self._changed.notify_all()
            self._watch.progress()

    def _due(self) -> list[Statement] | None:
        """Wait for entries and the time to try again, and return the entries; None to end."""
        with self._changed:
            failed = self.problem is not None
            retry_at = time.monotonic() + self._retry_seconds if failed else 0.0
            while not self._stopping.is_set():
                left = retry_at - time.monotonic()
                if self._waiting and left <= 0:
                    break
                self._changed.wait(left if left > 0 else None)
            if not self._waiting or (self._stopping.is_set() and failed):
                return None
            entries = list(self._waiting)
            self._waiting.clear()
            return entries

    def _write(self, entries: list[Statement]) -> bool:
        oldest = "(SELECT serial FROM {0} ORDER BY serial DESC LIMIT 1 OFFSET ?)"
        trims = [
            (f"DELETE FROM {table} WHERE serial <= {oldest.format(table)}", (self._keep,))
            for table in ("migrations", "actions")
        ]
        try:
            fault_point("thread.history")
            self._file.write([*entries, *trims])
        except SnapshotError as error:
            logger.log(logging.DEBUG if self.problem else logging.ERROR, "%s", error)
            self.failures += 1
            self.problem = str(error)
            return False
        self.problem = None
        return True
