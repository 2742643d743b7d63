"""Execute plans: start migrations, abort them, roll them back, and count and log their ends."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flexd.config.links import ControlConfig
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.daemon.migration import ChunkedDelta, Migration, MigrationMetadata
from flexd.core.errors import ApiError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta, Placement
from flexd.operations.plan_log import PlanLog
from flexd.operations.triggers import Trigger, TriggerKind
from flexd.planner.delta import delta_chunks, moved_bytes, plan_delta
from flexd.planner.plan import Plan
from flexd.planner.solver.limits import SlotBudgets

ROLLBACK = ".rollback"
"""Suffix of a rollback's id, after the id of the migration that it reverts."""
_KEPT_OPEN = 64


@dataclass(frozen=True)
class Execution:
    """A migration with its plan and trigger.

    Attributes:
        plan: the plan that it executes; None for a rollback.
        trigger: cause and requester.
        overridden: names of the closed gates that were overridden.
    """

    plan: Plan | None
    migration: Migration
    trigger: Trigger
    overridden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Abort:
    """Result of an abort.

    Attributes:
        stopped: the migration that was running, or else the newest waiting one.
        rollback: the rollback, if one was requested.
    """

    stopped: Execution
    rollback: Execution | None


@dataclass(frozen=True)
class RollbackPlan:
    """The rows that a rollback would move if it started now.

    Attributes:
        to_version: version of the placement that it would restore.
        delta: difference to the placement that all ranks have.
        bytes_to_copy: row values and optimizer state of the rows that it promotes, each once.
    """

    to_version: int
    delta: Delta
    bytes_to_copy: int


@dataclass(frozen=True)
class AbortPreview:
    """The effect that an abort would have now.

    Attributes:
        stopped: the running migration, or else the newest waiting one.
        waiting: the other unfinished migrations, oldest first.
        rollback_plan: the rollback, if one is requested and ranks are present.
    """

    stopped: Execution
    waiting: tuple[Execution, ...]
    rollback_plan: RollbackPlan | None


class Executions:
    """Starts and stops migrations. Thread-safe.

    Migrations that end are counted, and logged if they moved rows, in the coordinator's thread.

    Attributes:
        last: the newest execution.
        live_plan_id: id of the plan that the placement comes from; "" if none.
        migrations: ended migrations by final state.
        migrated: rows, chunks and bytes (values and optimizer state of promoted rows, each once) that every rank has
            applied.
    """

    def __init__(self, control: ControlConfig, keyspace: KeySpace, coordinator: Coordinator, log: PlanLog) -> None:
        self._control = control
        self._keyspace = keyspace
        self._coordinator = coordinator
        self._log = log
        self._lock = threading.Lock()
        self._open: list[Execution] = []
        self.last: Execution | None = None
        self.migrations: Counter[str] = Counter()
        self.migrated: Counter[str] = Counter()
        newest = log.newest
        self.live_plan_id = str(newest["plan_id"]) if newest else ""

    @property
    def migrating(self) -> bool:
        """True while the ranks move to another placement."""
        return self.last is not None and not self.last.migration.done

    def apply_config(self, control: ControlConfig) -> None:
        """Use other chunk sizes from the next migration on."""
        self._control = control

    def start(self, plan: Plan, trigger: Trigger, overridden: tuple[str, ...], live: LiveTopology) -> Execution:
        """Start the plan's migration, which supersedes a running one at its next chunk.

        Raises:
            ControlError: the coordinator is stopping.
        """

        def chunks(placement: Placement) -> ChunkedDelta:
            # Not the plan's own delta: an older migration may have moved rows since the plan was made.
            delta = plan_delta(placement, plan.target, plan.gains, self._keyspace, live.layout, plan.budgets)
            return self._chunked(delta, live.layout)

        return self._submit(
            plan.plan_id, chunks, plan.topology_generation,
            MigrationMetadata(
                plan.plan_id, plan.parent_id, trigger.kind.value, trigger.who, trigger.reason, plan.saved_seconds
            ),
            lambda migration: Execution(plan, migration, trigger, overridden),
        )  # fmt: skip

    def abort(self, reason: str, who: str, rollback: bool, live: LiveTopology | None) -> Abort:
        """Stop the running migration at its next chunk and discard the waiting ones.

        With ``rollback``, start a migration to the placement that the stopped one started from. It is a migration like
        any other and may be aborted itself.

        Raises:
            ApiError: no migration is unfinished (409), or no rank is registered to roll back (409).
            ControlError: the coordinator is stopping.
        """
        unfinished = self.unfinished(rollback, live)
        words = f"aborted by {who}" + (f": {reason}" if reason else "")
        for execution in unfinished:
            execution.migration.abort(words)
        stopped = _stopped(unfinished)
        return Abort(stopped, self._roll_back(stopped, reason, who, live) if rollback and live is not None else None)

    def preview_abort(self, rollback: bool, live: LiveTopology | None) -> AbortPreview:
        """Return the effect that ``abort`` would have now. Changes nothing.

        Raises:
            ApiError: as in ``abort``.
        """
        unfinished = self.unfinished(rollback, live)
        stopped = _stopped(unfinished)
        rollback_plan = self.rollback_plan(stopped.migration.base, live) if rollback and live is not None else None
        return AbortPreview(stopped, tuple(each for each in unfinished if each is not stopped), rollback_plan)

    def unfinished(self, rollback: bool, live: LiveTopology | None) -> list[Execution]:
        """Return the migrations that ``abort`` would end now, oldest first. Raises ApiError as ``abort`` does."""
        with self._lock:
            unfinished = [execution for execution in self._open if not execution.migration.done]
        if not unfinished:
            raise no_migration_running()
        if rollback and live is None:
            raise ApiError(
                "no rank is registered", status=409, remedy="abort without --rollback, or wait for the ranks"
            )
        return unfinished

    def _roll_back(self, stopped: Execution, reason: str, who: str, live: LiveTopology) -> Execution:
        migration = stopped.migration
        # Read when the rollback starts: a waiting migration may have started before it was aborted.
        return self.start_rollback(
            f"{migration.migration_id}{ROLLBACK}", migration.plan_id, lambda: migration.base, migration.generation,
            rollback_trigger(migration.migration_id, reason, who), live,
        )  # fmt: skip

    def start_rollback(
        self,
        name: str,
        plan_id: str,
        base: Callable[[], Placement | None],
        generation: int | None,
        trigger: Trigger,
        live: LiveTopology,
    ) -> Execution:
        """Start a migration to the placement ``base()``.

        Args:
            name: id of the rollback.
            plan_id: plan of the migration that it reverts.
            base: called when the rollback starts; None keeps the current placement.
            generation: topology generation; the rollback fails if the ranks have another one by then.

        Raises:
            ControlError: the coordinator is stopping.
        """

        def chunks(placement: Placement) -> ChunkedDelta:
            to = base()
            return self._chunked(self._delta_to(to, placement, live), live.layout, None if to is None else to.version)

        return self._submit(
            name, chunks, generation, MigrationMetadata(name, plan_id, trigger.kind.value, trigger.who, trigger.reason),
            lambda started: Execution(None, started, trigger),
        )  # fmt: skip

    def start_move(
        self, name: str, target: Placement, generation: int, trigger: Trigger, live: LiveTopology
    ) -> Execution:
        """Start a migration to a placement. If the daemon ends before it does, it stays at the chunk that it reached.

        Args:
            name: id of the migration.
            generation: topology generation; it fails if the ranks have another one by then.

        Raises:
            ControlError: the coordinator is stopping.
        """

        def chunks(placement: Placement) -> ChunkedDelta:
            return self._chunked(self._delta_to(target, placement, live), live.layout)

        return self._submit(
            name, chunks, generation,
            MigrationMetadata(name, self.live_plan_id, trigger.kind.value, trigger.who, trigger.reason),
            lambda started: Execution(None, started, trigger),
        )  # fmt: skip

    def rollback_plan(self, base: Placement | None, live: LiveTopology) -> RollbackPlan:
        """Return the rows that a rollback to ``base`` (None: the current placement) would move if it started now."""
        now = self._coordinator.placement()
        delta = self._delta_to(base, now, live)
        to_copy = int(moved_bytes(delta, self._keyspace, live.layout).sum())
        return RollbackPlan(now.version if base is None else base.version, delta, to_copy)

    def _delta_to(self, base: Placement | None, placement: Placement, live: LiveTopology) -> Delta:
        target = placement if base is None else replace(base, version=placement.version)
        slots = SlotBudgets(self._keyspace, live.layout, live.replica_slots)
        # The gain of rows that the plan demoted is unknown; with equal gains cheap rows move first.
        return plan_delta(placement, target, np.ones(len(target)), self._keyspace, live.layout, slots)

    def _chunked(self, delta: Delta, layout: RankLayout, returns_to: int | None = None) -> ChunkedDelta:
        control = self._control
        return ChunkedDelta(
            delta_chunks(delta, self._keyspace, layout, control.chunk_rows, control.chunk_bytes),
            rows=len(delta),
            bytes_to_copy=int(moved_bytes(delta, self._keyspace, layout).sum()),
            returns_to=returns_to,
        )

    def _submit(
        self,
        plan_id: str,
        chunks: Callable[[Placement], ChunkedDelta],
        generation: int | None,
        metadata: MigrationMetadata,
        made: Callable[[Migration], Execution],
    ) -> Execution:
        def on_progress(migration: Migration) -> None:
            if migration.done:
                self._ended(made(migration))

        with self._lock:
            execution = made(self._coordinator.migrate(plan_id, chunks, on_progress, generation, metadata))
            self.last = execution
            self._open = [*(each for each in self._open if not each.migration.done), execution][-_KEPT_OPEN:]
            return execution

    def _ended(self, execution: Execution) -> None:
        migration, plan, trigger = execution.migration, execution.plan, execution.trigger
        progress = migration.progress
        self.migrations[progress.state.value] += 1
        self.migrated["rows"] += progress.rows_applied
        self.migrated["chunks"] += progress.chunks_applied
        self.migrated["bytes"] += progress.copied_bytes
        if progress.chunks_pushed == 0:
            return
        self.live_plan_id = migration.plan_id
        entry: dict[str, object] = {
            "plan_id": migration.plan_id,
            "parent_id": migration.metadata.parent_plan_id,
            "reason": trigger.reason,
            "trigger": trigger.kind.value,
            "who": trigger.who,
            "overridden_gates": list(execution.overridden),
            "created_unix_seconds": progress.created_unix_seconds if plan is None else plan.created_unix_seconds,
            "topology_generation": migration.generation,
            "state": progress.state.value,
            "problem": progress.reason,
            "rows_applied": progress.rows_applied,
            "chunks": progress.chunks_pushed,
            "first_version": progress.base_version + 1,
            "last_version": progress.last_version,
        }
        if plan is not None:
            entry |= {
                "profile_generation": plan.profile_generation,
                "promotions": plan.promotions,
                "demotions": plan.demotions,
                "why": plan.summary()["replication"]["words"],
            }
        self._log.append(entry)


def _stopped(unfinished: list[Execution]) -> Execution:
    started = [execution for execution in unfinished if execution.migration.base is not None]
    return (started or unfinished)[-1]


def no_migration_running() -> ApiError:
    """Return the error of an abort without an unfinished migration."""
    return ApiError("no migration is running", status=409, remedy="flexd history shows those that have ended")


def rollback_trigger(migration_id: str, reason: str, who: str) -> Trigger:
    """Return the trigger of a rollback of the given migration."""
    return Trigger(TriggerKind.MANUAL, f"rollback of {migration_id}: {reason}".rstrip(": "), who)
