"""Commands on migrations: their history, abort, and rollback."""

import threading
import time
from collections.abc import Sequence

from flexd.api.migration import (
    AbortOutcome,
    AbortPreview,
    AbortResult,
    MigrationList,
    RollbackOutcome,
    RollbackPreview,
    RollbackResult,
)
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import LiveTopology
from flexd.control.daemon.migration import Migration, MigrationRecord, MigrationState
from flexd.core.errors import ApiError
from flexd.core.placement import Placement
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.decisions import MAX_ROLLED_BACK, DecisionFile
from flexd.operations.executions import Executions, stopped_of
from flexd.operations.history import MigrationHistory
from flexd.operations.rollback import LATEST, PastPlacement, Rollbacks


class MigrationCommands:
    """Each raises SnapshotError if the file of the history cannot be read. Thread-safe.

    Args:
        stopping: set when the daemon ends: no wait outlives it.
    """

    def __init__(
        self,
        executions: Executions,
        history: MigrationHistory,
        coordinator: Coordinator,
        auto: AutoPlanner,
        stopping: threading.Event,
        decisions: DecisionFile,
    ) -> None:
        self._executions = executions
        self._rollbacks = Rollbacks(executions, coordinator, history, decisions)
        self._decisions = decisions
        self._history = history
        self._coordinator = coordinator
        self._auto = auto
        self._stopping = stopping

    def migrations(self, limit: int, state: MigrationState | None) -> MigrationList:
        """Return at most ``limit`` migrations, newest first; only those in ``state`` if one is given."""
        records = self._history.newest(limit, state)
        return MigrationList(
            migrations=tuple(self._as_of_now(record.model_copy(update={"transitions": ()})) for record in records),
            actions=self._history.newest_actions(limit) if state is None else (),
            problem=self._history.problem,
        )

    def migration(self, migration_id: str) -> MigrationRecord:
        """Return one migration of the history; ``latest`` is the newest. Raises ApiError if there is none (404)."""
        if migration_id == LATEST:
            newest = self._history.newest(1)
            migration_id = newest[0].migration_id if newest else migration_id
        found = self._history.find(migration_id)
        if found is None:
            raise ApiError(
                f"no migration {migration_id!r} is kept", status=404, remedy="flexd get history shows those that are"
            )
        return self._as_of_now(found)

    def _as_of_now(self, record: MigrationRecord) -> MigrationRecord:
        """Return a record of the history with the verification that is still running."""
        verifier = self._auto.verifier
        found = None if verifier is None else verifier.newest
        if found is not None and found.migration_id == record.migration_id:
            record = record.model_copy(update={"verification": found})
        return record

    def abort(self, *, rollback: bool, reason: str, wait_seconds: float, requested_by: str) -> AbortResult:
        """Stop the running migration at its next chunk; with ``rollback`` restore the placement it started from.

        Waits at most ``wait_seconds``; a deadline that passes is no error.

        Raises:
            ApiError: no migration is running (409), no ranks to roll back to (409), or shutting down (503).
        """
        deadline, requested_by = time.monotonic() + wait_seconds, requested_by or "anonymous"
        stopped: Migration | None = None
        back: Migration | None
        if self._of_earlier_daemon(rollback):
            shown, back = self._executions.roll_back_interrupted(reason, requested_by)
        else:
            live = self._coordinator.live()
            unfinished = self._executions.unfinished(rollback, live)
            self._record_rollback(unfinished if rollback else ())
            stopped, back = self._executions.abort(unfinished, reason, requested_by, live if rollback else None)
        # Otherwise the next interval could start the same migration again at once.
        self._auto.record_manual_plan(executed=True)
        for migration in (stopped, back):
            if migration is not None:
                self._wait(migration, deadline)
        if stopped is not None:
            shown = stopped.report()
        return AbortResult(
            outcome=_outcome(stopped, back, wait_seconds > 0),
            migration=shown,
            rollback=None if back is None else back.report(),
            placement_version=self._coordinator.placement().version,
            message=_message(shown, back),
        )

    def _wait(self, migration: Migration, deadline: float) -> None:
        while not migration.done and (left := deadline - time.monotonic()) > 0 and not self._stopping.is_set():
            migration.wait(min(0.5, left))

    def rollback(
        self, *, migration_id: str, to_version: int | None, reason: str, wait_seconds: float, requested_by: str
    ) -> RollbackResult:
        """Restore the placement before an ended migration, or of a version. Waits as ``abort``.

        Raises:
            ApiError: as ``Rollbacks.find``; paused (409), not exactly one of both is given (422), or shutting down
                (503).
        """
        deadline, requested_by = time.monotonic() + wait_seconds, requested_by or "anonymous"
        pause = self._decisions.current.pause
        if pause is not None:
            raise ApiError(f"paused: {pause.reason}", status=409, remedy="flexd resume")
        past = self._past(migration_id, to_version)
        back = self._rollbacks.restore(past, reason, requested_by)
        self._auto.record_manual_plan(executed=True)
        self._wait(back, deadline)
        now = back.report()
        return RollbackResult(
            outcome=_rollback_outcome(back, wait_seconds > 0), migration=now, takes_back=past.takes_back,
            placement_version=self._coordinator.placement().version,
            message=f"to version {past.placement.version}: {now.state.value}, {now.rows_applied} of {len(past.delta)} "
            "rows applied",
        )  # fmt: skip

    def preview_rollback(self, *, migration_id: str, to_version: int | None) -> RollbackPreview:
        """Return what ``rollback`` would do now. Changes nothing. Raises ApiError as ``rollback``, but for a pause."""
        past = self._past(migration_id, to_version)
        preview = self._rollback_preview(past.placement, past.live)
        return preview.model_copy(update={"takes_back": past.takes_back})

    def _past(self, migration_id: str, to_version: int | None) -> PastPlacement:
        if self._stopping.is_set():
            raise ApiError("the daemon is shutting down", status=503)
        if bool(migration_id) is (to_version is not None):
            raise ApiError("a rollback takes a migration or a version", status=422, remedy="give one of the two")
        return self._rollbacks.find(migration_id, to_version)

    def preview_abort(self, *, rollback: bool) -> AbortPreview:
        """Return what ``abort`` would do now. Changes nothing. Raises ApiError as ``abort``."""
        live = self._coordinator.live()
        if self._of_earlier_daemon(rollback):
            shown, base = self._executions.preview_interrupted()
            return AbortPreview(migration=shown, rollback=None if live is None else self._rollback_preview(base, live))
        unfinished = self._executions.unfinished(rollback, live)
        stopped = stopped_of(unfinished)
        return AbortPreview(
            migration=stopped.report(),
            waiting=tuple(each.migration_id for each in unfinished if each is not stopped),
            rollback=self._rollback_preview(stopped.base, live) if rollback and live is not None else None,
        )

    def _of_earlier_daemon(self, rollback: bool) -> bool:
        """Return whether a rollback would be that of a migration which an earlier daemon left."""
        if self._stopping.is_set():
            raise ApiError("the daemon is shutting down", status=503)
        return rollback and not self._executions.migrating and self._executions.interrupted is not None

    def _rollback_preview(self, base: Placement | None, live: LiveTopology) -> RollbackPreview:
        delta, to_copy = self._executions.rollback_delta(base, live)
        promotions = int((delta.new_tiers > delta.old_tiers).sum())
        return RollbackPreview(
            to_version=(self._coordinator.placement() if base is None else base).version, promotions=promotions,
            demotions=len(delta) - promotions, bytes=to_copy,
        )  # fmt: skip

    def _record_rollback(self, to_be_undone: Sequence[Migration]) -> None:
        """Record the requested rollback before any migration ends, so that the next daemon can finish it."""
        ids = tuple(migration.migration_id for migration in to_be_undone[-MAX_ROLLED_BACK:])
        if ids != self._decisions.current.rollback:
            self._decisions.update(rollback=ids)


def _outcome(stopped: Migration | None, back: Migration | None, waited: bool) -> AbortOutcome:
    if back is not None and (stopped is None or stopped.done):
        return _rollback_outcome(back, waited)
    assert stopped is not None  # noqa: S101
    if not stopped.done:
        return "timed_out" if waited else "accepted"
    return "stopped" if stopped.state is MigrationState.ABORTED else "ended"


def _rollback_outcome(back: Migration, waited: bool) -> RollbackOutcome:
    if not back.done:
        return "timed_out" if waited else "accepted"
    return "rolled_back" if back.state is MigrationState.COMMITTED else "rollback_failed"


def _message(stopped: MigrationRecord, back: Migration | None) -> str:
    where = (
        f"{stopped.rows_applied} of {stopped.rows} rows applied, placement version "
        f"{stopped.last_version or stopped.base_version}"
        if stopped.chunks_pushed or stopped.started_unix_seconds
        else "nothing of it was pushed"
    )
    text = f"migration {stopped.migration_id} is {stopped.state.value}: {where}"
    if back is not None:
        now = back.record
        text += f"; its rollback is {now.state.value}, {now.rows_applied} of {now.rows} rows applied"
    return text
