"""Commands on migrations: their history, and abort."""

import threading
import time
from collections.abc import Sequence

from flexd.api.migration import AbortOutcome, AbortPreview, AbortResult, MigrationList, RollbackPreview
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import LiveTopology
from flexd.control.daemon.migration import Migration, MigrationRecord, MigrationState
from flexd.core.errors import ApiError
from flexd.core.placement import Placement
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.decisions import MAX_ROLLED_BACK, DecisionFile
from flexd.operations.executions import Executions, stopped_of
from flexd.operations.history import MigrationHistory

LATEST = "latest"


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
            while (
                migration is not None
                and not migration.done
                and (left := deadline - time.monotonic()) > 0
                and not self._stopping.is_set()
            ):
                migration.wait(min(0.5, left))
        if stopped is not None:
            shown = stopped.report()
        return AbortResult(
            outcome=_outcome(stopped, back, wait_seconds > 0),
            migration=shown,
            rollback=None if back is None else back.report(),
            placement_version=self._coordinator.placement().version,
            message=_message(shown, back),
        )

    def preview_abort(self, *, rollback: bool) -> AbortPreview:
        """Return what ``abort`` would do now. Changes nothing. Raises ApiError as ``abort``."""
        live = self._coordinator.live()
        if self._of_earlier_daemon(rollback):
            shown, base = self._executions.preview_interrupted()
            return AbortPreview(migration=shown, rollback=self._rollback_preview(base, live))
        unfinished = self._executions.unfinished(rollback, live)
        stopped = stopped_of(unfinished)
        return AbortPreview(
            migration=stopped.report(),
            waiting=tuple(each.migration_id for each in unfinished if each is not stopped),
            rollback=self._rollback_preview(stopped.base, live) if rollback else None,
        )

    def _of_earlier_daemon(self, rollback: bool) -> bool:
        """Return whether a rollback would be that of a migration which an earlier daemon left."""
        if self._stopping.is_set():
            raise ApiError("the daemon is shutting down", status=503)
        return rollback and not self._executions.migrating and self._executions.interrupted is not None

    def _rollback_preview(self, base: Placement | None, live: LiveTopology | None) -> RollbackPreview | None:
        if live is None:
            return None
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
    last = stopped if back is None or (stopped is not None and not stopped.done) else back
    assert last is not None  # noqa: S101
    if not last.done:
        return "timed_out" if waited else "accepted"
    if last is back:
        return "rolled_back" if back.state is MigrationState.COMMITTED else "rollback_failed"
    return "stopped" if last.state is MigrationState.ABORTED else "ended"


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
