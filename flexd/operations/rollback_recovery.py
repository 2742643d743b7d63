"""Roll back migrations that an earlier daemon left unfinished, and resume rollbacks that it had started."""

from __future__ import annotations

import logging
import re
from itertools import count

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import MigrationRecord, MigrationState
from flexd.core.errors import ApiError, FlexdError, SnapshotError
from flexd.core.placement import Placement
from flexd.operations.decisions import DecisionFile
from flexd.operations.executions import (
    ROLLBACK,
    Executions,
    no_migration_running,
    rollback_trigger,
)
from flexd.operations.history import ENDED_UNSEEN, MigrationHistory
from flexd.operations.triggers import DAEMON_ACTOR

logger = logging.getLogger("flexd")

_AGAIN = re.compile(r"-\d+$")
"""Suffix of the id of a rollback that resumes one of an earlier daemon."""


class RollbackRecovery:
    """Starts and resumes rollbacks of interrupted migrations. Thread-safe.

    The target comes from the placement journal; a history that cannot be read prevents nothing.
    """

    def __init__(
        self,
        executions: Executions,
        history: MigrationHistory,
        coordinator: Coordinator,
        decisions: DecisionFile,
    ) -> None:
        self._executions = executions
        self._history = history
        self._coordinator = coordinator
        self._decisions = decisions

    @property
    def interrupted(self) -> MigrationRecord | None:
        """The migration that an earlier daemon left partially applied, or whose requested rollback had not started.

        None once this daemon has started a migration, or if the ranks have changed since.
        """
        newest = None if self._executions.last is not None else self._coordinator.newest_migration()
        if newest is None:
            return None
        recorded = self._recorded(newest.migration_id)
        # A daemon that shut down in order has recorded that the migration which it gave up has failed.
        failed = recorded is None or recorded.state is MigrationState.FAILED
        return newest if failed or self._was_requested(newest) else None

    def resume(self) -> bool:
        """Resume a rollback that was requested from an earlier daemon. Returns False if there is none.

        Call it when all ranks are ready and before anything is planned.
        """
        interrupted = self.interrupted
        if interrupted is None or not (interrupted.returns_to is not None or self._was_requested(interrupted)):
            return False
        try:
            _, rollback = self.start("the daemon ended before it was done", DAEMON_ACTOR)
        except FlexdError as error:
            logger.warning("the rollback of %s cannot be resumed: %s", interrupted.migration_id, error)
            return False
        logger.info("%s resumes the rollback that was requested", rollback.migration_id)
        return True

    def start(self, reason: str, requested_by: str) -> tuple[MigrationRecord, Migration]:
        """Roll back the ``interrupted`` migration; if that was a rollback itself, complete it.

        Returns the interrupted migration, as far as the journal tells if the history has lost it, and the rollback.

        Raises:
            ApiError: no migration was interrupted, not all ranks are ready, or the journal no longer has the target
                placement (409 each).
            ControlError: the coordinator is stopping.
        """
        interrupted, base, live = self._target()
        stopped = self._stopped(interrupted)
        if not self._was_requested(interrupted):
            self._decisions.update(rollback=(interrupted.migration_id,))
        started = self._executions.start_rollback(
            self._unused_id(interrupted), base, live.generation,
            rollback_trigger(interrupted.migration_id, reason, requested_by), interrupted.plan_id,
        )  # fmt: skip
        return stopped, started

    def preview(self) -> tuple[MigrationRecord, Placement]:
        """Return the interrupted migration, and the placement that ``start`` would restore. Changes nothing.

        Raises:
            ApiError: as in ``start``.
        """
        interrupted, base, _ = self._target()
        return self._stopped(interrupted), base

    def _target(self) -> tuple[MigrationRecord, Placement, LiveTopology]:
        interrupted, live = self.interrupted, self._coordinator.live()
        if interrupted is None:
            raise no_migration_running()
        if live is None or not live.ready:
            raise ApiError("not all ranks are ready", status=409, remedy="flexd status shows which are missing")
        try:
            return interrupted, self._coordinator.placement_at(interrupted.rollback_version), live
        except SnapshotError as error:
            raise ApiError(
                f"migration {interrupted.migration_id} cannot be rolled back: placement version "
                f"{interrupted.rollback_version} is not in the journal any more",
                status=409,
                remedy="flexd replan makes a plan from what the ranks have now",
            ) from error

    def _stopped(self, interrupted: MigrationRecord) -> MigrationRecord:
        lost = interrupted.model_copy(update={"state": MigrationState.FAILED, "problem": ENDED_UNSEEN})
        return self._recorded(interrupted.migration_id) or lost

    def _was_requested(self, interrupted: MigrationRecord) -> bool:
        """Return whether a user requested the rollback of this migration."""
        return interrupted.migration_id in self._decisions.current.rollback

    def _unused_id(self, interrupted: MigrationRecord) -> str:
        """Return an id that neither the history nor the interrupted rollback has: every attempt stays visible."""
        base = interrupted.migration_id
        base = f"{base}{ROLLBACK}" if interrupted.returns_to is None else _AGAIN.sub("", base)
        names = (base if number == 1 else f"{base}-{number}" for number in count(1))
        return next(name for name in names if name != interrupted.migration_id and self._recorded(name) is None)

    def _recorded(self, migration_id: str) -> MigrationRecord | None:
        """Return the migration from the history; None if it is missing or the history cannot be read."""
        try:
            return self._history.find(migration_id)
        except SnapshotError:
            return None
