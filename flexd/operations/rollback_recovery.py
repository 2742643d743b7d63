"""The way back from a migration that ended with the daemon that ran it, and what is left of a rollback that did."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from itertools import count

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.daemon.journal import JournalledMigration
from flexd.control.daemon.migration_states import MigrationState
from flexd.core.errors import ApiError, FlexdError, SnapshotError
from flexd.core.placement import Placement
from flexd.operations.decisions import DecisionFile, RequestedRollback
from flexd.operations.executions import (
    ROLLBACK,
    Execution,
    Executions,
    RollbackPlan,
    no_migration_running,
    rollback_trigger,
)
from flexd.operations.history.history import MigrationHistory
from flexd.operations.history.records import MigrationRecord
from flexd.operations.plan_log import PlanLog
from flexd.operations.triggers import ITSELF

logger = logging.getLogger("flexd")

_AGAIN = re.compile(r"-\d+$")
"""Behind the id of a rollback that goes on with one of an earlier daemon."""


@dataclass(frozen=True)
class RecoveredRollback:
    """A rollback that an earlier daemon has left to this one.

    Attributes:
        interrupted: what the journal knows of the earlier daemon's migration; a rollback itself, if this one goes on
            with it.
        recorded: what the history knows of it; None if it was lost there.
    """

    interrupted: JournalledMigration
    recorded: MigrationRecord | None
    rollback: Execution


class RollbackRecovery:
    """Thread-safe. Where to is in the journal of placements; a history that cannot be read is not in the way."""

    def __init__(
        self,
        executions: Executions,
        log: PlanLog,
        history: MigrationHistory,
        coordinator: Coordinator,
        decisions: DecisionFile,
    ) -> None:
        self._executions = executions
        self._log = log
        self._history = history
        self._coordinator = coordinator
        self._decisions = decisions

    @property
    def interrupted(self) -> JournalledMigration | None:
        """The migration that an earlier daemon left behind before all of it was applied, or before the rollback that
        it was asked for had begun; None once this one has started any, or if the ranks are others by now."""
        newest = None if self._executions.last is not None else self._coordinator.newest_migration()
        logged = self._log.newest
        if newest is None or logged is None or logged.get("plan_id") != newest.plan_id:
            return newest
        # The last daemon may have ended in good order: it has seen the end of what it then had to give up.
        return newest if logged.get("state") == MigrationState.FAILED.value or self._was_requested(newest) else None

    def resume(self) -> bool:
        """Goes on with a rollback that an earlier daemon was asked for; False if there is none. Call it when the ranks
        are all there, before anything else is planned."""
        interrupted = self.interrupted
        if interrupted is None or not (interrupted.returns_to is not None or self._was_requested(interrupted)):
            return False
        try:
            done = self.start("the daemon ended before it was done", ITSELF)
        except FlexdError as error:
            logger.warning("the rollback of %s does not go on: %s", interrupted.migration_id, error)
            return False
        logger.info("%s goes on with the rollback that was asked for", done.rollback.migration.migration_id)
        return True

    def start(self, reason: str, who: str) -> RecoveredRollback:
        """Goes back to where the ``interrupted`` migration started, or on to where it was going if that was a rollback.

        Raises:
            ApiError: there is none, the ranks are not all there, or the journal was compacted beyond that placement
                (409 each).
            ControlError: the coordinator is stopping.
        """
        interrupted, base, live = self._target()
        recorded = self._recorded(interrupted.migration_id)
        if not self._was_requested(interrupted):
            self._decisions.update(rollback=RequestedRollback(migration_ids=(interrupted.migration_id,)))
        started = self._executions.start_rollback(
            self._unused_id(interrupted), interrupted.plan_id, lambda: base, live.generation,
            rollback_trigger(interrupted.migration_id, reason, who), live,
        )  # fmt: skip
        return RecoveredRollback(interrupted, recorded, started)

    def preview(self) -> tuple[JournalledMigration, MigrationRecord | None, RollbackPlan]:
        """What ``begin`` would come to now. Changes nothing.

        Raises:
            ApiError: as ``begin``.
        """
        interrupted, base, live = self._target()
        return interrupted, self._recorded(interrupted.migration_id), self._executions.rollback_plan(base, live)

    def _target(self) -> tuple[JournalledMigration, Placement, LiveTopology]:
        interrupted, live = self.interrupted, self._coordinator.live()
        if interrupted is None:
            raise no_migration_running()
        if live is None or not live.ready:
            raise ApiError("the ranks are not all there", status=409, remedy="flexd status says what is missing")
        try:
            return interrupted, self._coordinator.placement_at(interrupted.rollback_version), live
        except SnapshotError as error:
            raise ApiError(
                f"migration {interrupted.migration_id} cannot be taken back: placement version "
                f"{interrupted.rollback_version} is not in the journal any more",
                status=409,
                remedy="flexd replan makes a plan from what the ranks have now",
            ) from error

    def _was_requested(self, interrupted: JournalledMigration) -> bool:
        """Was somebody already told that this migration is taken back?"""
        asked = self._decisions.current.rollback
        return asked is not None and interrupted.migration_id in asked.migration_ids

    def _unused_id(self, interrupted: JournalledMigration) -> str:
        """Every try keeps its place in the history, and one that died before it was written there keeps its id."""
        base = interrupted.migration_id
        base = f"{base}{ROLLBACK}" if interrupted.returns_to is None else _AGAIN.sub("", base)
        names = (base if number == 1 else f"{base}-{number}" for number in count(1))
        return next(name for name in names if name != interrupted.migration_id and self._recorded(name) is None)

    def _recorded(self, migration_id: str) -> MigrationRecord | None:
        """None also if the history cannot be read."""
        try:
            found = self._history.find(migration_id)
        except SnapshotError:
            return None
        return None if found is None else found[0]
