"""Automatic planning: turn a trigger into a migration, or into a proposal where the configuration asks for one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import MigrationState
from flexd.core.errors import FlexdError
from flexd.core.fault_points import fault_point
from flexd.core.layout import Tier
from flexd.core.supervision import Backoff
from flexd.operations.drift import DriftMonitor
from flexd.operations.planning import Planning
from flexd.operations.triggers import Triggers
from flexd.operations.verification import Verifier, plan_kind
from flexd.planner.plan import Plan

FIRST_SECONDS = 5.0
LONGEST_SECONDS = 300.0


class FailureBackoff:
    """Only the daemon's loop calls ``observe``; any thread may call the rest.

    The wait begins at ``FIRST_SECONDS`` and doubles up to ``LONGEST_SECONDS`` with every migration that fails without
    an applied chunk. A committed migration, and ranks of another topology generation, end it.
    """

    def __init__(self) -> None:
        self._newest: Migration | None = None
        self._backoff = Backoff(FIRST_SECONDS, LONGEST_SECONDS)
        self._until = 0.0
        self._failure: tuple[str, int | None] = ("", None)
        """Reason of the failure, and the topology generation of the migration."""

    def observe(self, migration: Migration | None, now: float) -> None:
        """Record the newest migration once it has ended.

        Args:
            now: monotonic seconds.
        """
        if migration is None or not migration.done or migration is self._newest:
            return
        self._newest = migration
        if migration.state is MigrationState.COMMITTED:
            self._backoff.reset()
            self._until = now
        elif migration.state is MigrationState.FAILED:
            if migration.record.chunks_applied:
                self._backoff = Backoff(FIRST_SECONDS, LONGEST_SECONDS)
            self._failure = (
                f"migration {migration.migration_id} failed: {migration.record.problem}",
                migration.record.generation,
            )
            self._until = now + self._backoff.seconds()

    def seconds(self, now: float, generation: int) -> float:
        """Return the rest of the wait, for ranks of this topology generation; 0 if there is none."""
        return max(0.0, self._until - now) if self._failure[1] in (None, generation) else 0.0

    def reason(self, now: float, generation: int) -> str:
        """Return why no plan is made now; empty if there is no reason."""
        seconds = self.seconds(now, generation)
        return f"{self._failure[0]} (tried again by itself in {seconds:.0f} s)" if seconds else ""


logger = logging.getLogger(__name__)


class AutoPlanner:
    """Plans when a trigger fires. Only the daemon's loop calls ``tick``; any thread may read attributes.

    Args:
        resume_rollback: called once, when all ranks are ready for the first time. Resumes a rollback that an earlier
            daemon left unfinished and returns whether there was one; the planning interval then starts over.
        verifier: measures executed plans; the daemon makes no plan by itself meanwhile.

    Attributes:
        refusal: why the newest attempt made no plan; empty if it made one.
        failure_backoff: waits after a failed migration; a user's plan does not.
    """

    def __init__(
        self,
        planner: PlannerConfig,
        planning: Planning,
        drift: DriftMonitor,
        live: Callable[[], LiveTopology | None],
        resume_rollback: Callable[[], bool] = lambda: False,
        verifier: Verifier | None = None,
    ) -> None:
        self.triggers = Triggers(planner, time.monotonic())
        self.failure_backoff = FailureBackoff()
        self._planning = planning
        self._drift = drift
        self._live = live
        self._resume_rollback = resume_rollback
        self._rollback_checked = False
        self.verifier = verifier
        self._logged = ""
        self.refusal = ""

    def tick(self) -> None:
        """Make a plan if a trigger has fired, and execute it unless it is held."""
        fault_point("thread.planning")
        live = self._live()
        if live is None or not live.ready:
            return
        if not self._rollback_checked:
            resumed = self._resume_rollback()
            self._rollback_checked = True
            if resumed:
                self.triggers.migration_started(time.monotonic(), live.generation)
                return
        if self.verifier is not None and self.verifier.tick(live):
            return
        self.failure_backoff.observe(self._planning.executions.last, time.monotonic())
        if self.failure_backoff.seconds(time.monotonic(), live.generation):
            return
        due = self.triggers.due(time.monotonic(), time.time(), live.generation, self._drift.pop_reason)
        if due is None:
            return
        try:
            proposal = self._planning.propose(due)
            held = self._held_back(proposal.plan)
            if held and not proposal.withheld:
                if held != self._logged:
                    logger.info("plan %s (%s) is proposed only: %s", proposal.plan.plan_id, due.reason, held)
                self._logged, self.refusal = held, ""
                self.triggers.plan_made(due, live.generation)
                return
            if due.held and len(proposal.plan.delta) and not proposal.withheld:
                logger.info("plan %s (%s) is proposed only: %s", proposal.plan.plan_id, due.reason, due.held)
            else:
                self._planning.execute(proposal)
        except FlexdError as error:
            # The remedy identifies the cause: figures in the message change with every attempt.
            if error.remedy != self._logged:
                logger.info("no plan: %s", error)
            self._logged, self.refusal = error.remedy, error.message
            return
        self._logged = self.refusal = ""
        self.triggers.plan_made(due, live.generation)

    def _held_back(self, plan: Plan) -> str:
        """Return why a plan of this kind is not executed by itself: one like it did not win; empty if it is.

        What takes rows back because the live placement exceeds its limits is not held.
        """
        kind = plan_kind(plan)
        if self.verifier is None or not kind or (kind == Tier.HOME.name and not plan.live_fits):
            return ""
        return self.verifier.held.reason(kind)

    def held_off(self) -> tuple[float, str]:
        """Return the seconds for which a failed migration holds the daemon's next plan back, and why; (0, "") if
        nothing does."""
        live, now = self._live(), time.monotonic()
        generation = 0 if live is None else live.generation
        return self.failure_backoff.seconds(now, generation), self.failure_backoff.reason(now, generation)

    def record_manual_plan(self, *, executed: bool) -> None:
        """Record a plan that a user requested, and whether it was executed."""
        live = self._live() if executed else None
        self.triggers.record_manual_plan(time.monotonic(), executed=executed)
        if live is not None:
            self.triggers.migration_started(time.monotonic(), live.generation)

    def apply_config(self, planner: PlannerConfig) -> None:
        """Use other settings from the next tick on."""
        self.triggers.apply_settings(planner, time.monotonic())
        if self.verifier is not None:
            self.verifier.apply_config(planner)
