"""The history of migrations, with their verifications, and of users' actions: recorded without touching the disk,
written with every tick of the daemon."""

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
from flexd.operations.decisions import StateDatabase, Statement

MAX_WAITING = 4096
"""Limit of entries that wait to be written; beyond it the oldest are lost."""
RETRY_SECONDS = 5.0
ENDED_UNSEEN = "the daemon ended while it was unfinished"
MAX_DETAIL_CHARACTERS = 2_000

ActionKind = Literal["pause", "resume", "throttle", "reload", "override", "withhold", "verify"]

logger = logging.getLogger(__name__)


# Field of a migration that is recorded after its end, by itself.
_VERIFICATION = {"verification"}
_UPSERT = (
    "INSERT INTO migrations (id, document) VALUES (?, ?) "
    "ON CONFLICT (id) DO UPDATE SET document = json_patch(document, excluded.document)"
)
# Of a migration that is not kept any more nothing is written.
_ADD = "UPDATE migrations SET document = json_patch(document, ?) WHERE id = ?"


class MigrationHistory:
    """The history of migrations and actions. Thread-safe.

    Recording never touches the disk; ``write`` does, and so does a query, for what was recorded before it. Migrations
    that a crash left unfinished are recorded as failed.

    Args:
        file: the state; the caller closes it.
        keep: limit of migrations, and of actions.

    Attributes:
        lost: entries dropped because too many waited.
        problem: why the newest write failed; None if it succeeded.

    Raises:
        StateVersionError: a newer flexd wrote the file; it is unchanged.
        SnapshotError: the file cannot be read.
    """

    def __init__(self, file: StateDatabase, keep: int) -> None:
        self._file = file
        self._keep = keep
        self._guard = threading.Lock()
        self._writing = threading.Lock()
        self._waiting: deque[Statement] = deque()
        self._retry_at = 0.0
        self.lost = 0
        self.problem: str | None = None
        self._fail_unfinished()

    def write(self) -> bool:
        """Write the entries recorded so far. Returns whether all are on disk.

        After a failure nothing is written for ``RETRY_SECONDS``.
        """
        oldest = "(SELECT serial FROM {0} ORDER BY serial DESC LIMIT 1 OFFSET ?)"
        trims = [
            (f"DELETE FROM {table} WHERE serial <= {oldest.format(table)}", (self._keep,))
            for table in ("migrations", "actions")
        ]
        with self._writing:
            if time.monotonic() < self._retry_at:
                return False
            with self._guard:
                entries = list(self._waiting)
                self._waiting.clear()
            if not entries:
                return True
            self._retry_at = time.monotonic() + RETRY_SECONDS
            try:
                self._file.write([*entries, *trims])
                self.problem, self._retry_at = None, 0.0
            except SnapshotError as error:
                logger.log(logging.DEBUG if self.problem else logging.ERROR, "%s", error)
                self.problem = str(error)
            finally:
                if self._retry_at:
                    with self._guard:
                        self._waiting.extendleft(reversed(entries))
                        self._drop_too_many()
            return not self._retry_at

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
        self.write()
        rows = self._file.read("SELECT document FROM actions ORDER BY serial DESC LIMIT ?", limit)
        return tuple(ActionRecord.model_validate_json(document) for (document,) in rows)

    def _select(self, clause: str, *values: object) -> tuple[MigrationRecord, ...]:
        self.write()
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
        with self._guard:
            self._waiting.append((statement, values))
            self._drop_too_many()

    def _drop_too_many(self) -> None:
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.lost += 1
