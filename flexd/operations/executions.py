"""Execute plans: start migrations, abort them, roll them back, count their ends, and resume rollbacks that an earlier
daemon left unfinished."""

import logging
import re
import threading
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import count

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import LiveTopology
from flexd.control.daemon.migration import Migration, MigrationEvent, MigrationRecord, MigrationState
from flexd.core.errors import ApiError, FlexdError, SnapshotError
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Delta, Placement
from flexd.operations.decisions import DecisionFile
from flexd.operations.history import ENDED_UNSEEN, MigrationHistory
from flexd.planner.plan import Plan, moved_bytes

DAEMON_ACTOR = "flexd"
"""The requester of actions that the daemon takes by itself."""


class TriggerKind(Enum):
    INTERVAL = "interval"
    DRIFT = "drift"
    TOPOLOGY = "topology"
    MANUAL = "manual"
    VERIFY = "verify"


@dataclass(frozen=True)
class Trigger:
    """Why a plan is made.

    Attributes:
        kind: kind of the cause.
        reason: the cause in words, recorded with plan and migration.
        requested_by: the user who requested it, or ``DAEMON_ACTOR``.
        held: why the plan is only proposed; empty if it is executed.
    """

    kind: TriggerKind
    reason: str
    requested_by: str = DAEMON_ACTOR
    held: str = ""

    def record(self, name: str, parent_plan_id: str, generation: int | None) -> MigrationRecord:
        """Return the record of a migration that it causes."""
        return MigrationRecord(
            migration_id=name, plan_id=name, parent_plan_id=parent_plan_id, generation=generation,
            trigger=self.kind.value, requested_by=self.requested_by, reason=self.reason,
        )  # fmt: skip


logger = logging.getLogger("flexd")

# Suffix of the id of a rollback that resumes one of an earlier daemon.
_AGAIN = re.compile(r"-\d+$")
ROLLBACK = ".rollback"
"""Suffix of a rollback's id, after the id of the migration that it reverts."""
_KEPT_OPEN = 64


class Executions:
    """Starts and stops migrations, and rolls back those that an earlier daemon left. Thread-safe.

    The target of such a rollback comes from the placement journal; a history that cannot be read prevents nothing.

    Attributes:
        last, last_plan: the newest migration, and the plan that it carries out; None for a rollback.
        live_plan_id: id of the plan that the placement comes from; "" if none.
        migrations: ended migrations by final state.
        migrated: rows, chunks and bytes (values and optimizer state of promoted rows, each once) that every rank has
            applied.
    """

    def __init__(
        self, keyspace: KeySpace, coordinator: Coordinator, history: MigrationHistory, decisions: DecisionFile
    ) -> None:
        self._keyspace = keyspace
        self._coordinator = coordinator
        self._history = history
        self._decisions = decisions
        self._lock = threading.Lock()
        self._open: list[Migration] = []
        self.last: Migration | None = None
        self.last_plan: Plan | None = None
        self.migrations: Counter[str] = Counter()
        self.migrated: Counter[str] = Counter()
        self.live_plan_id = next((moved.plan_id for moved in history.newest_moves(1)), "")

    @property
    def migrating(self) -> bool:
        """True while the ranks move to another placement."""
        return self.last is not None and not self.last.done

    def start(self, record: MigrationRecord, target: Placement, plan: Plan | None = None) -> Migration:
        """Start a migration to a placement, which supersedes a running one at its next chunk.

        If the daemon ends before it does, it stays at the chunk that it reached; a rollback is resumed.

        Args:
            record: of the migration. With a ``generation`` it fails if the ranks are of another one when it starts.
            plan: that it carries out.

        Raises:
            ControlError: the coordinator is stopping.
        """
        with self._lock:
            migration = self._coordinator.migrate(record, target, plan)
            self.last, self.last_plan = migration, plan
            self._open = [*(each for each in self._open if not each.done), migration][-_KEPT_OPEN:]
            return migration

    def abort(
        self, unfinished: list[Migration], reason: str, requested_by: str, back_on: LiveTopology | None
    ) -> tuple[Migration, Migration | None]:
        """Stop the running migration at its next chunk and discard the waiting ones.

        Given the ranks to roll back, start a migration to the placement that the stopped one started from. It is a
        migration like any other and may be aborted itself. Returns the migration that was running, or else the newest
        waiting one, and the rollback.

        Args:
            unfinished: as ``unfinished`` returns them.

        Raises:
            ControlError: the coordinator is stopping.
        """
        message = f"aborted by {requested_by}" + (f": {reason}" if reason else "")
        for migration in unfinished:
            migration.abort(message)
        stopped = stopped_of(unfinished)
        if back_on is None:
            return stopped, None
        # Aborted, it does not start any more: without a base by now it has changed nothing.
        base = self._coordinator.placement() if stopped.base is None else stopped.base
        return stopped, self.start_rollback(stopped.record, base, stopped.record.generation, reason, requested_by)

    def unfinished(self, rollback: bool, live: LiveTopology | None) -> list[Migration]:
        """Return the migrations that an abort would end now, oldest first.

        Raises:
            ApiError: there is none (409), or no rank is registered to roll back (409).
        """
        with self._lock:
            unfinished = [migration for migration in self._open if not migration.done]
        if not unfinished:
            raise no_migration_running()
        if rollback and live is None:
            raise ApiError(
                "no rank is registered", status=409, remedy="abort without --rollback, or wait for the ranks"
            )
        return unfinished

    def start_rollback(
        self, of: MigrationRecord, base: Placement, generation: int | None, reason: str, requested_by: str,
        *, kind: TriggerKind = TriggerKind.MANUAL, name: str = "",
    ) -> Migration:  # fmt: skip
        """Start a migration back to the placement ``base``.

        Args:
            of: the migration that it reverts.
            generation: topology generation; the rollback fails if the ranks have another one by then.
            name: id of the rollback, if it is not the usual one.

        Raises:
            ControlError: the coordinator is stopping.
        """
        trigger = Trigger(kind, f"rollback of {of.migration_id}: {reason}".rstrip(": "), requested_by)
        record = trigger.record(name or f"{of.migration_id}{ROLLBACK}", of.plan_id, generation)
        return self.start(record.model_copy(update={"returns_to": base.version}), base)

    def rollback_delta(self, base: Placement | None, live: LiveTopology) -> tuple[Delta, int]:
        """Return the rows that a rollback to ``base`` (None: the current placement) would move if it started now, and
        the bytes of values and optimizer state of those that it promotes, each once."""
        placement = self._coordinator.placement()
        delta = placement.delta_to(placement if base is None else base)
        return delta, int(moved_bytes(delta, self._keyspace, live.layout).sum())

    def on_migration(self, event: MigrationEvent) -> None:
        """Count a migration whose figures are final."""
        if event.transition is not None:
            return
        record = event.migration.record
        self.migrations[record.state.value] += 1
        self.migrated["rows"] += record.rows_applied
        self.migrated["chunks"] += record.chunks_applied
        self.migrated["bytes"] += record.copied_bytes
        if record.chunks_pushed:
            self.live_plan_id = record.plan_id

    @property
    def interrupted(self) -> MigrationRecord | None:
        """The migration that an earlier daemon left partially applied, or whose requested rollback had not started.

        None once this daemon has started a migration, or if the ranks have changed since.
        """
        newest = None if self.last is not None else self._coordinator.journal.newest_migration
        if newest is None:
            return None
        recorded = self._recorded(newest.migration_id)
        # A daemon that shut down in order has recorded that the migration which it gave up has failed.
        failed = recorded is None or recorded.state is MigrationState.FAILED
        return newest if failed or self._was_requested(newest) else None

    def resume_rollback(self) -> bool:
        """Resume a rollback that was requested from an earlier daemon. Returns False if there is none.

        Call it when all ranks are ready and before anything is planned.
        """
        interrupted = self.interrupted
        if interrupted is None or not (interrupted.returns_to is not None or self._was_requested(interrupted)):
            return False
        try:
            _, rollback = self.roll_back_interrupted("the daemon ended before it was done", DAEMON_ACTOR)
        except FlexdError as error:
            logger.warning("the rollback of %s cannot be resumed: %s", interrupted.migration_id, error)
            return False
        logger.info("%s resumes the rollback that was requested", rollback.migration_id)
        return True

    def roll_back_interrupted(self, reason: str, requested_by: str) -> tuple[MigrationRecord, Migration]:
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
        name = self.unused_id(interrupted)
        return stopped, self.start_rollback(interrupted, base, live.generation, reason, requested_by, name=name)

    def preview_interrupted(self) -> tuple[MigrationRecord, Placement]:
        """Return the interrupted migration, and the placement that its rollback would restore. Changes nothing.

        Raises:
            ApiError: as in ``roll_back_interrupted``.
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
            return interrupted, self.placement_at(interrupted.rollback_version), live
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
        return interrupted.migration_id in self._decisions.current.rollback

    def placement_at(self, version: int) -> Placement:
        """Return the placement of a version; that of 0 has no copy. Raises SnapshotError if it is not kept."""
        return self._coordinator.journal.placement_at(version) if version else Placement.empty()

    def unused_id(self, interrupted: MigrationRecord) -> str:
        """Return an id for a rollback of this migration, or for another attempt at this rollback, that neither it nor
        the history has: every attempt stays visible."""
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


def stopped_of(unfinished: list[Migration]) -> Migration:
    """Return the running one of migrations, or else the newest waiting one."""
    return ([migration for migration in unfinished if migration.base is not None] or unfinished)[-1]


def no_migration_running() -> ApiError:
    """Return the error of an abort without an unfinished migration."""
    return ApiError(
        "no migration is running", status=409,
        remedy="flexd get history shows those that have ended; flexd rollback ID takes one back",
    )  # fmt: skip
