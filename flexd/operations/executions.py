"""Plans on their way to the ranks: started, aborted, rolled back, and accounted for."""

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
"""What the id of a rollback has behind the id of the migration that it takes back."""
_KEPT_OPEN = 64


@dataclass(frozen=True)
class Execution:
    """A migration and what it is for.

    Attributes:
        plan: None for a rollback.
        trigger: what led to it, and who.
        overridden: names of the gates that were closed and overridden.
    """

    plan: Plan | None
    migration: Migration
    trigger: Trigger
    overridden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Abort:
    """What an abort has set going.

    Attributes:
        stopped: the migration that was running, or else the newest that waited.
        rollback: the way back, if that was asked for.
    """

    stopped: Execution
    rollback: Execution | None


@dataclass(frozen=True)
class RollbackPlan:
    """What a rollback would move if it began now.

    Attributes:
        to_version: of the placement that it would bring back.
        delta: from what the ranks have agreed on.
        bytes_to_copy: row values and optimizer state of the rows that it promotes, each once.
    """

    to_version: int
    delta: Delta
    bytes_to_copy: int


@dataclass(frozen=True)
class AbortPreview:
    """What an abort would come to now.

    Attributes:
        stopped: the migration that runs, or else the newest that waits. waiting: the others, oldest first.
        rollback_plan: if there is one to begin.
    """

    stopped: Execution
    waiting: tuple[Execution, ...]
    rollback_plan: RollbackPlan | None


class Executions:
    """Thread-safe. Ended migrations are counted, and logged if they moved rows, in the coordinator's thread.

    Attributes:
        last: the newest. live_plan_id: of the plan that the placement came from, "" if none.
        migrations: ended ones by final state. migrated: rows, chunks and bytes (values and optimizer state of promoted
            rows, each once) that every rank has applied.
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
        """Whether the ranks are on their way to another placement."""
        return self.last is not None and not self.last.migration.done

    def apply_config(self, control: ControlConfig) -> None:
        """Other sizes of chunks, from the next migration on."""
        self._control = control

    def start(self, plan: Plan, trigger: Trigger, overridden: tuple[str, ...], live: LiveTopology) -> Execution:
        """Starts the plan's migration, which supersedes the one in flight at its next chunk.

        Raises:
            ControlError: the coordinator is stopping.
        """

        def chunks(placement: Placement) -> ChunkedDelta:
            # Not the plan's own delta: an older migration may have gone on since the plan was made.
            delta = plan_delta(placement, plan.target, plan.gains, self._keyspace, live.layout, plan.budgets)
            return self._chunked(delta, live.layout)

        return self._submit(
            plan.plan_id, chunks, plan.topology_generation,
            MigrationMetadata(plan.plan_id, plan.parent_id, trigger.kind.value, trigger.who, trigger.reason),
            lambda migration: Execution(plan, migration, trigger, overridden),
        )  # fmt: skip

    def abort(self, reason: str, who: str, rollback: bool, live: LiveTopology | None) -> Abort:
        """Stops what is under way at its next chunk; whatever waits behind it is not started.

        With ``rollback`` a migration goes back to the placement that it started from, which the parent plan had left:
        a migration like any other, that may be aborted itself.

        Raises:
            ApiError: nothing is under way (409), or there are no ranks to roll back to (409).
            ControlError: the coordinator is stopping.
        """
        under_way = self.unfinished(rollback, live)
        words = f"aborted by {who}" + (f": {reason}" if reason else "")
        for execution in under_way:
            execution.migration.abort(words)
        stopped = _stopped(under_way)
        return Abort(stopped, self._roll_back(stopped, reason, who, live) if rollback and live is not None else None)

    def preview_abort(self, rollback: bool, live: LiveTopology | None) -> AbortPreview:
        """What ``abort`` would come to now. Changes nothing.

        Raises:
            ApiError: as ``abort``.
        """
        under_way = self.unfinished(rollback, live)
        stopped = _stopped(under_way)
        rollback_plan = self.rollback_plan(stopped.migration.base, live) if rollback and live is not None else None
        return AbortPreview(stopped, tuple(each for each in under_way if each is not stopped), rollback_plan)

    def unfinished(self, rollback: bool, live: LiveTopology | None) -> list[Execution]:
        """What ``abort`` would end now, oldest first. Raises as ``abort``."""
        with self._lock:
            under_way = [execution for execution in self._open if not execution.migration.done]
        if not under_way:
            raise no_migration_running()
        if rollback and live is None:
            raise ApiError(
                "no rank is registered", status=409, remedy="abort without --rollback, or wait for the ranks"
            )
        return under_way

    def _roll_back(self, stopped: Execution, reason: str, who: str, live: LiveTopology) -> Execution:
        migration = stopped.migration
        # Asked when it starts: what waited for its turn may have started after all, before it was aborted.
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
        """Goes to ``base`` (None: where the ranks are), which is asked when it starts.

        Args:
            name: its id. plan_id: of what it takes back. generation: fail if the ranks are of another by then.

        Raises:
            ControlError: the coordinator is stopping.
        """

        def chunks(placement: Placement) -> ChunkedDelta:
            there = base()
            delta = self._delta_to(there, placement, live)
            return self._chunked(delta, live.layout, None if there is None else there.version)

        return self._submit(
            name, chunks, generation, MigrationMetadata(name, plan_id, trigger.kind.value, trigger.who, trigger.reason),
            lambda started: Execution(None, started, trigger),
        )  # fmt: skip

    def rollback_plan(self, base: Placement | None, live: LiveTopology) -> RollbackPlan:
        """What a rollback to ``base`` (None: where the ranks are) would move if it began now."""
        now = self._coordinator.placement()
        delta = self._delta_to(base, now, live)
        to_copy = int(moved_bytes(delta, self._keyspace, live.layout).sum())
        return RollbackPlan(now.version if base is None else base.version, delta, to_copy)

    def _delta_to(self, base: Placement | None, placement: Placement, live: LiveTopology) -> Delta:
        target = placement if base is None else replace(base, version=placement.version)
        slots = SlotBudgets(self._keyspace, live.layout, live.replica_slots)
        # What a row gains is not known of rows that the plan let go; equal gains take cheap rows first.
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


def _stopped(under_way: list[Execution]) -> Execution:
    started = [execution for execution in under_way if execution.migration.base is not None]
    return (started or under_way)[-1]


def no_migration_running() -> ApiError:
    """What an abort is told then."""
    return ApiError("no migration is under way", status=409, remedy="flexd history shows those that have ended")


def rollback_trigger(migration_id: str, reason: str, who: str) -> Trigger:
    """Of the rollback of a migration."""
    return Trigger(TriggerKind.MANUAL, f"rollback of {migration_id}: {reason}".rstrip(": "), who)
