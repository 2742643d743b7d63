"""Execute plans: start migrations, abort them, roll them back, and count and log their ends."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from flexd.config.server import ControlConfig
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.daemon.event_log import MigrationEvent
from flexd.control.daemon.migration import ChunkedDelta, ChunkSource, Migration
from flexd.control.daemon.migration_record import MigrationRecord
from flexd.core.errors import ApiError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta, Placement
from flexd.operations.triggers import Trigger, TriggerKind
from flexd.planner.delta import delta_chunks, moved_bytes, plan_delta
from flexd.planner.plan import Plan

ROLLBACK = ".rollback"
"""Suffix of a rollback's id, after the id of the migration that it reverts."""
_KEPT_OPEN = 64


class Executions:
    """Starts and stops migrations. Thread-safe.

    Args:
        live_plan_id: id of the plan that the placement comes from, as an earlier daemon knew it.

    Attributes:
        last, last_plan: the newest migration, and the plan that it carries out; None for a rollback.
        live_plan_id: id of the plan that the placement comes from; "" if none.
        migrations: ended migrations by final state.
        migrated: rows, chunks and bytes (values and optimizer state of promoted rows, each once) that every rank has
            applied.
    """

    def __init__(
        self, control: ControlConfig, keyspace: KeySpace, coordinator: Coordinator, live_plan_id: str = ""
    ) -> None:
        self._control = control
        self._keyspace = keyspace
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._open: list[Migration] = []
        self.last: Migration | None = None
        self.last_plan: Plan | None = None
        self.migrations: Counter[str] = Counter()
        self.migrated: Counter[str] = Counter()
        self.live_plan_id = live_plan_id

    @property
    def migrating(self) -> bool:
        """True while the ranks move to another placement."""
        return self.last is not None and not self.last.done

    def apply_config(self, control: ControlConfig) -> None:
        """Use other chunk sizes from the next migration on."""
        self._control = control

    def start(self, plan: Plan, trigger: Trigger, overridden: tuple[str, ...], live: LiveTopology) -> Migration:
        """Start the plan's migration, which supersedes a running one at its next chunk.

        Raises:
            ControlError: the coordinator is stopping.
        """

        def chunks(placement: Placement) -> ChunkedDelta:
            return self._chunked(plan.delta_from(placement, self._keyspace, live.layout), live.layout)

        origin = _of_trigger(plan.plan_id, plan.origin.parent_id, trigger).model_copy(
            update={
                "overridden_gates": overridden, "rows": len(plan.delta), "bytes_to_copy": plan.migration_bytes,
                "promotions": plan.promotions, "demotions": plan.demotions,
                "why": tuple(plan.costs.messages()), "predicted_saving_seconds": plan.saved_seconds,
            }
        )  # fmt: skip
        return self._submit(origin, chunks, plan.origin.topology_generation, plan)

    def abort(
        self, reason: str, requested_by: str, rollback: bool, live: LiveTopology | None
    ) -> tuple[Migration, Migration | None]:
        """Stop the running migration at its next chunk and discard the waiting ones.

        With ``rollback``, start a migration to the placement that the stopped one started from. It is a migration like
        any other and may be aborted itself. Returns the migration that was running, or else the newest waiting one,
        and the rollback.

        Raises:
            ApiError: no migration is unfinished (409), or no rank is registered to roll back (409).
            ControlError: the coordinator is stopping.
        """
        unfinished = self.unfinished(rollback, live)
        message = f"aborted by {requested_by}" + (f": {reason}" if reason else "")
        for migration in unfinished:
            migration.abort(message)
        stopped = stopped_of(unfinished)
        if not rollback or live is None:
            return stopped, None
        # Its base is read when the rollback starts: a waiting migration may have started before it was aborted.
        return stopped, self.start_rollback(
            f"{stopped.migration_id}{ROLLBACK}", stopped.plan_id, lambda: stopped.base, stopped.generation,
            rollback_trigger(stopped.migration_id, reason, requested_by), live,
        )  # fmt: skip

    def unfinished(self, rollback: bool, live: LiveTopology | None) -> list[Migration]:
        """Return the migrations that ``abort`` would end now, oldest first. Raises ApiError as ``abort`` does."""
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
        self,
        name: str,
        plan_id: str,
        base: Callable[[], Placement | None],
        generation: int | None,
        trigger: Trigger,
        live: LiveTopology,
    ) -> Migration:
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

        return self._submit(_of_trigger(name, plan_id, trigger), chunks, generation)

    def start_move(
        self, name: str, target: Placement, generation: int, trigger: Trigger, live: LiveTopology
    ) -> Migration:
        """Start a migration to a placement. If the daemon ends before it does, it stays at the chunk that it reached.

        Args:
            name: id of the migration.
            generation: topology generation; it fails if the ranks have another one by then.

        Raises:
            ControlError: the coordinator is stopping.
        """

        def chunks(placement: Placement) -> ChunkedDelta:
            return self._chunked(self._delta_to(target, placement, live), live.layout)

        return self._submit(_of_trigger(name, self.live_plan_id, trigger), chunks, generation)

    def rollback_delta(self, base: Placement | None, live: LiveTopology) -> tuple[Delta, int]:
        """Return the rows that a rollback to ``base`` (None: the current placement) would move if it started now, and
        the bytes of values and optimizer state of those that it promotes, each once."""
        delta = self._delta_to(base, self._coordinator.placement(), live)
        return delta, int(moved_bytes(delta, self._keyspace, live.layout).sum())

    def _delta_to(self, base: Placement | None, placement: Placement, live: LiveTopology) -> Delta:
        target = placement if base is None else replace(base, version=placement.version)
        # The gain of rows that the plan demoted is unknown; with equal gains cheap rows move first.
        return plan_delta(placement, target, np.ones(len(target)), self._keyspace, live.layout, live.replica_slots)

    def _chunked(self, delta: Delta, layout: RankLayout, returns_to: int | None = None) -> ChunkedDelta:
        control = self._control
        return ChunkedDelta(
            delta_chunks(delta, self._keyspace, layout, control.chunk_rows, control.chunk_bytes),
            rows=len(delta),
            bytes_to_copy=int(moved_bytes(delta, self._keyspace, layout).sum()),
            returns_to=returns_to,
        )

    def _submit(
        self, origin: MigrationRecord, chunks: ChunkSource, generation: int | None, plan: Plan | None = None
    ) -> Migration:
        with self._lock:
            migration = self._coordinator.migrate(origin.migration_id, chunks, generation, origin)
            self.last, self.last_plan = migration, plan
            self._open = [*(each for each in self._open if not each.done), migration][-_KEPT_OPEN:]
            return migration

    def on_migration(self, event: MigrationEvent) -> None:
        """Count a migration whose figures are final. Called in the coordinator's thread."""
        if event.transition is not None:
            return
        record = event.migration.record
        self.migrations[record.state.value] += 1
        self.migrated["rows"] += record.rows_applied
        self.migrated["chunks"] += record.chunks_applied
        self.migrated["bytes"] += record.copied_bytes
        if record.chunks_pushed:
            self.live_plan_id = record.plan_id


def _of_trigger(name: str, parent_plan_id: str, trigger: Trigger) -> MigrationRecord:
    return MigrationRecord(
        migration_id=name, parent_plan_id=parent_plan_id, trigger=trigger.kind.value, requested_by=trigger.requested_by,
        reason=trigger.reason,
    )  # fmt: skip


def stopped_of(unfinished: list[Migration]) -> Migration:
    """Return the running one of migrations, or else the newest waiting one."""
    started = [migration for migration in unfinished if migration.base is not None]
    return (started or unfinished)[-1]


def no_migration_running() -> ApiError:
    """Return the error of an abort without an unfinished migration."""
    return ApiError("no migration is running", status=409, remedy="flexd get history shows those that have ended")


def rollback_trigger(migration_id: str, reason: str, requested_by: str) -> Trigger:
    """Return the trigger of a rollback of the given migration."""
    return Trigger(TriggerKind.MANUAL, f"rollback of {migration_id}: {reason}".rstrip(": "), requested_by)
