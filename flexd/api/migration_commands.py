"""Commands on migrations: their history, and abort."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from flexd.api.execution import AbortOutcome, AbortPreview, AbortResult, rollback_preview
from flexd.api.migration import (
    MigrationDetail,
    MigrationList,
    MigrationStateName,
    action_entry,
    ended_report,
    migration_detail,
    migration_entry,
    migration_report,
)
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import MigrationRecord
from flexd.control.daemon.migration_states import MigrationState
from flexd.core.errors import ApiError
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.decisions import MAX_ROLLED_BACK, DecisionFile
from flexd.operations.effects import EffectRecorder
from flexd.operations.executions import Abort, Execution, Executions
from flexd.operations.history import MigrationHistory
from flexd.operations.rollback_recovery import RollbackRecovery

LATEST = "latest"
_POLL_SECONDS = 0.5


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
        recovery: RollbackRecovery,
        decisions: DecisionFile,
        effects: EffectRecorder,
    ) -> None:
        self._executions = executions
        self._recovery = recovery
        self._decisions = decisions
        self._history = history
        self._coordinator = coordinator
        self._auto = auto
        self._stopping = stopping
        self._effects = effects

    def migrations(self, limit: int, state: MigrationStateName | None) -> MigrationList:
        """Return at most ``limit`` migrations, newest first; only those in ``state`` if one is given."""
        records = self._history.newest(limit, None if state is None else MigrationState[state])
        actions = self._history.newest_actions(limit) if state is None else ()
        return MigrationList(
            migrations=tuple(migration_entry(self._as_of_now(record)) for record in records),
            actions=tuple(action_entry(record) for record in actions),
            problem=self._history.snapshot.problem,
        )

    def migration(self, migration_id: str) -> MigrationDetail:
        """Return one migration of the history; ``latest`` is the newest. Raises ApiError if there is none (404)."""
        if migration_id == LATEST:
            newest = self._history.newest(1)
            migration_id = newest[0].migration_id if newest else migration_id
        found = self._history.find(migration_id)
        if found is None:
            raise ApiError(
                f"no migration {migration_id!r} is kept", status=404, remedy="flexd get history shows those that are"
            )
        return migration_detail(self._as_of_now(found))

    def _as_of_now(self, record: MigrationRecord) -> MigrationRecord:
        """Return a record of the history with the effect and the verification that are still being measured."""
        verifier, effect = self._auto.verifier, self._effects.newest()
        verdict = None if verifier is None else verifier.newest
        if effect is not None and effect[0] == record.migration_id:
            record = replace(record, effect=effect[1])
        if verdict is not None and verdict.migration_id == record.migration_id:
            record = replace(record, verdict=verdict)
        return record

    def abort(self, *, rollback: bool, reason: str, wait_seconds: float, who: str) -> AbortResult:
        """Stop the running migration at its next chunk; with ``rollback`` restore the placement it started from.

        Waits at most ``wait_seconds``; a deadline that passes is no error.

        Raises:
            ApiError: no migration is running (409), no ranks to roll back to (409), or shutting down (503).
        """
        if self._stopping.is_set():
            raise ApiError("the daemon is shutting down", status=503)
        deadline = time.monotonic() + wait_seconds
        if rollback and not self._executions.migrating and self._recovery.interrupted is not None:
            return self._recover_rollback(reason, wait_seconds, deadline, who or "anonymous")
        live = self._coordinator.live()
        unfinished = self._executions.unfinished(rollback, live)
        self._record_rollback(unfinished if rollback else ())
        done = self._executions.abort(reason, who or "anonymous", rollback, live)
        # Otherwise the next interval could start the same migration again at once.
        self._auto.record_manual_plan(executed=True)
        self._wait(done.stopped.migration, deadline)
        if done.rollback is not None:
            self._wait(done.rollback.migration, deadline)
        return AbortResult(
            outcome=_outcome(done, wait_seconds > 0),
            migration=migration_report(done.stopped),
            rollback=None if done.rollback is None else migration_report(done.rollback),
            placement_version=self._coordinator.placement().version,
            message=_message(done),
        )

    def preview_abort(self, *, rollback: bool) -> AbortPreview:
        """Return what ``abort`` would do now. Changes nothing. Raises ApiError as ``abort``."""
        if self._stopping.is_set():
            raise ApiError("the daemon is shutting down", status=503)
        if rollback and not self._executions.migrating and self._recovery.interrupted is not None:
            stopped, rollback_plan = self._recovery.preview()
            return AbortPreview(
                migration=ended_report(stopped), rows_pushed=stopped.rows_pushed,
                rollback=rollback_preview(rollback_plan),
            )  # fmt: skip
        preview = self._executions.preview_abort(rollback, self._coordinator.live())
        return AbortPreview(
            migration=migration_report(preview.stopped),
            rows_pushed=preview.stopped.migration.record.rows_pushed,
            waiting=tuple(each.migration.migration_id for each in preview.waiting),
            rollback=None if preview.rollback_plan is None else rollback_preview(preview.rollback_plan),
        )

    def _record_rollback(self, to_be_undone: Sequence[Execution]) -> None:
        """Record the requested rollback before any migration ends, so that the next daemon can finish it."""
        ids = tuple(execution.migration.migration_id for execution in to_be_undone[-MAX_ROLLED_BACK:])
        if ids != self._decisions.current.rollback:
            self._decisions.update(rollback=ids)

    def _recover_rollback(self, reason: str, wait_seconds: float, deadline: float, who: str) -> AbortResult:
        done = self._recovery.start(reason, who)
        self._auto.record_manual_plan(executed=True)
        back = done.rollback.migration
        self._wait(back, deadline)
        now = back.record
        return AbortResult(
            outcome=_rollback_outcome(back, wait_seconds > 0),
            migration=ended_report(done.stopped),
            rollback=migration_report(done.rollback),
            placement_version=self._coordinator.placement().version,
            message=f"migration {done.stopped.migration_id} had ended with the daemon; its rollback to placement "
            f"version {done.interrupted.rollback_version} is {now.state.value}, {now.rows_applied} of {now.rows} rows "
            "applied",
        )

    def _wait(self, migration: Migration, deadline: float) -> None:
        while not migration.done and time.monotonic() < deadline and not self._stopping.is_set():
            migration.wait(min(_POLL_SECONDS, deadline - time.monotonic()))


def _outcome(done: Abort, waited: bool) -> AbortOutcome:
    stopped = done.stopped.migration
    if not stopped.done:
        return "timed_out" if waited else "accepted"
    if done.rollback is None:
        return "stopped" if stopped.state is MigrationState.ABORTED else "ended"
    return _rollback_outcome(done.rollback.migration, waited)


def _rollback_outcome(back: Migration, waited: bool) -> AbortOutcome:
    if not back.done:
        return "timed_out" if waited else "accepted"
    return "rolled_back" if back.state is MigrationState.COMMITTED else "rollback_failed"


def _message(done: Abort) -> str:
    progress = done.stopped.migration.record
    where = (
        f"{progress.rows_applied} of {progress.rows} rows applied, placement version "
        f"{progress.last_version or progress.base_version}"
        if progress.base_version or progress.rows
        else "nothing of it was pushed"
    )
    text = f"migration {done.stopped.migration.migration_id} is {progress.state.value}: {where}"
    if done.rollback is not None:
        back = done.rollback.migration.record
        text += f"; its rollback is {back.state.value}, {back.rows_applied} of {back.rows} rows applied"
    return text
