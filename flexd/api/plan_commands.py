"""Commands that plan: dry runs, explanations, proposals, re-plan and apply."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from flexd.api.execution import ReplanOutcome, ReplanResult
from flexd.api.explanation import Explanation, explanation
from flexd.api.operator_commands import OperatorCommands
from flexd.api.plan import PlanReport, UserNodePage, proposal_report, user_node_page
from flexd.api.planning import ProposalList, proposal_list
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_states import MigrationState
from flexd.core.errors import ApiError
from flexd.core.keyspace import KeySpace
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.planning import Planning
from flexd.operations.proposals import Proposal
from flexd.operations.triggers import Trigger, TriggerKind

_OUTCOMES: Mapping[MigrationState, ReplanOutcome] = {
    MigrationState.COMMITTED: "committed",
    MigrationState.SUPERSEDED: "superseded",
    MigrationState.ABORTED: "aborted",
    MigrationState.FAILED: "failed",
}


class PlanCommands:
    """Each raises PlanError if no plan can be made: too few accesses, no ranks. Thread-safe.

    Args:
        stopping: set when the daemon ends: no wait outlives it.
        operator: the pause.
    """

    def __init__(
        self,
        keyspace: KeySpace,
        planning: Planning,
        auto: AutoPlanner,
        coordinator: Coordinator,
        stopping: threading.Event,
        operator: OperatorCommands,
    ) -> None:
        self._keyspace = keyspace
        self._planning = planning
        self._auto = auto
        self._coordinator = coordinator
        self._stopping = stopping
        self._operator = operator

    def plan(self) -> PlanReport:
        """Make a dry run, which is kept for ``apply``."""
        # A GET does not name its user.
        trigger = Trigger(TriggerKind.MANUAL, "dry run", requested_by="")
        return proposal_report(self._planning.propose(trigger, dry_run=True))

    def explain(self, table: str, row: int | None, hottest: int) -> Explanation:
        """Explain the tier of a row, or of the ``hottest`` rows of a table, by a plan made now. Moves nothing.

        Raises:
            ApiError: no such table or row (404).
        """
        index = self._keyspace.index.get(table)
        if index is None:
            names = ", ".join(each.name for each in self._keyspace.tables)
            raise ApiError(f"no table {table!r}", status=404, remedy=f"one of {names}"[:500])
        rows = self._keyspace.tables[index].rows
        if row is not None and not 0 <= row < rows:
            raise ApiError(f"no row {row} in table {table!r}", status=404, remedy=f"0 to {rows - 1}")
        made, gates = self._planning.explain(table, row, hottest)
        affinity = self._planning.affinity
        return explanation(made, gates) if affinity is None else explanation(made, gates, affinity.home_of)

    def proposals(self) -> ProposalList:
        """Return the kept plans."""
        return proposal_list(self._planning)

    def proposal(self, plan_id: str) -> PlanReport:
        """Return a kept plan. Raises ApiError if there is none of that id (404)."""
        return proposal_report(self._planning.proposals.get(plan_id))

    def user_nodes(self, offset: int, limit: int) -> UserNodePage:
        """Return users and their nodes. Raises ApiError if none is known (409)."""
        affinity = self._planning.affinity
        found = None if affinity is None else affinity.user_nodes()
        if found is None:
            raise ApiError(
                "the node of no user is known",
                status=409,
                remedy="send user_ids with the samples, set sketch.coaccess_memory_bytes, and make a plan: flexd plan",
            )
        return user_node_page(found, offset, limit)

    def replan(self, reason: str, wait_seconds: float, *, force: bool = False, requested_by: str = "") -> ReplanResult:
        """Plan now and start the migration; wait at most ``wait_seconds`` for its end.

        Returns early when the daemon shuts down. A deadline that passes is no error: the outcome is ``timed_out`` and
        the migration goes on.

        Args:
            force: carry it out although a gate is closed; recorded.
            requested_by: the person or program that requests it; recorded.

        Raises:
            ApiError: paused (409), or shutting down (503).
        """
        self._check_running()
        proposal = self._planning.propose(_manual_trigger(reason, requested_by), force=force)
        migration = self._planning.execute(proposal, force=force)
        return self._report(proposal, migration, wait_seconds)

    def apply(
        self, plan_id: str, reason: str, wait_seconds: float, *, force: bool = False, requested_by: str = ""
    ) -> ReplanResult:
        """Carry a kept plan out; waits and returns like ``replan``.

        Raises:
            PlanError: ranks, placement or accesses have changed since it was made, or a gate was closed.
            ApiError: no plan of that id is kept (404), paused (409), or shutting down (503).
        """
        self._check_running()
        proposal, migration = self._planning.apply(plan_id, _manual_trigger(reason, requested_by), force=force)
        return self._report(proposal, migration, wait_seconds)

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise ApiError("the daemon is shutting down", status=503)
        paused = self._operator.pause_reason
        if paused is not None:
            raise ApiError(f"paused: {paused}", status=409, remedy="flexd resume")

    def _report(self, proposal: Proposal, migration: Migration | None, wait_seconds: float) -> ReplanResult:
        self._auto.record_manual_plan(executed=True)
        if migration is not None:
            record = migration.record
            self._operator.record_override(
                record.requested_by, record.reason, proposal.plan.plan_id, record.overridden_gates
            )
        report = proposal_report(proposal)
        if migration is None and len(proposal.plan.delta):
            return self._result("withheld", report, f"{proposal.withheld}: nothing is moved")
        if migration is None:
            return self._result("unchanged", report, "the live placement is as good as the plan: nothing to move")
        deadline = time.monotonic() + wait_seconds
        while time.monotonic() < deadline and not migration.done and not self._stopping.is_set():
            migration.wait(min(0.5, deadline - time.monotonic()))
        state = migration.state
        outcome = _OUTCOMES.get(state, "timed_out" if wait_seconds > 0 else "accepted")
        result = self._result(outcome, report, f"{len(proposal.plan.delta)} rows: migration {state.value}")
        return result.model_copy(update={"migration": migration.report()})

    def _result(self, outcome: ReplanOutcome, plan: PlanReport, message: str) -> ReplanResult:
        version = self._coordinator.placement().version
        return ReplanResult(outcome=outcome, plan=plan, placement_version=version, message=message)


def _manual_trigger(reason: str, requested_by: str) -> Trigger:
    return Trigger(TriggerKind.MANUAL, reason, requested_by or "anonymous")
