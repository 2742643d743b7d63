"""Make plans from the current profile, keep them as proposals, and turn them into migrations."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from flexd.config.model import Config
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.migration import Migration
from flexd.core.errors import PlanError
from flexd.core.placement import Placement
from flexd.operations.affinity import AffinityMonitor
from flexd.operations.executions import Executions
from flexd.operations.live_plan import PlanBasis, PlanMaker, TrainingJob, cheaper_exchange, plan_limits, plan_moves
from flexd.operations.proposals import (
    Gate,
    Proposal,
    Proposals,
    evaluate_gates,
    outdated,
    require_current,
    require_open,
    saving_gate,
)
from flexd.operations.triggers import Trigger
from flexd.planner.affinity.outlook import AffinityOutlook
from flexd.planner.explain import TableExplanation, explain
from flexd.planner.plan import Plan
from flexd.sketch.profile import Profile

PLAN_OUTCOMES = ("changed", "unchanged", "withheld", "refused")
"""``withheld``: the plan would have saved less than ``planner.min_saving``."""


class Planning:
    """Makes, keeps and executes plans, one at a time, and counts them. Thread-safe.

    Args:
        executions: starts the migrations of plans.
        on_executed: called whenever a plan is executed, withheld, or turns out to change nothing.
        on_withheld: called with the requester and the reason when a plan is withheld, once until a plan moves rows.
        affinity: learns homes from rows that occur together with every plan; None where they are not sampled.

    Attributes:
        withheld: why the newest plan was withheld; empty if it was not.
    """

    def __init__(
        self,
        config: Config,
        maker: PlanMaker,
        coordinator: Coordinator,
        executions: Executions,
        on_executed: Callable[[], None] = lambda: None,
        on_withheld: Callable[[str, str], None] = lambda requested_by, reason: None,
        affinity: AffinityMonitor | None = None,
    ) -> None:
        self.affinity = affinity
        self._settings = config.planner
        self.maker = maker
        self._coordinator = coordinator
        self._on_executed = on_executed
        self._on_withheld = on_withheld
        self._withheld_said = False
        self.withheld = ""
        self.check(config)
        self._making = threading.Lock()
        self._serial = 0
        self.last_plan: Plan | None = None
        self.last_live: Placement = Placement.empty()
        self.last_profile: Profile | None = None
        self.outcomes: Counter[str] = Counter()
        self.overridden: Counter[str] = Counter()
        self.proposals = Proposals()
        self.last_gates: tuple[Gate, ...] = ()
        self.seconds = 0.0
        self._profiled_at = math.nan
        self.executions = executions

    def check(self, config: Config) -> None:
        """Raise PlanError if ``config`` names tables or rows that do not exist."""
        plan_limits(config.planner, TrainingJob()).check(self.maker.keyspace)

    def apply_config(self, config: Config) -> None:
        """Use other settings from the next plan on."""
        self._settings = config.planner

    def profile_age_seconds(self) -> float:
        """Seconds since the newest profile was made; NaN before the first."""
        return time.monotonic() - self._profiled_at

    def propose(self, trigger: Trigger, *, dry_run: bool = False, force: bool = False) -> Proposal:
        """Make a plan from the current profile and keep it for ``apply``. Moves nothing.

        Args:
            dry_run: make it even if gates are closed, and do not record it as the newest plan.
            force: make it even if gates are closed.

        Raises:
            PlanError: not all ranks are ready, the accesses of a step are not known, or a gate is closed.
        """
        with self._making:
            started = time.monotonic()
            try:
                checked = not (dry_run or force)
                plan, basis, affinity = self._make(trigger.reason, checked=checked, moves=True)
            except PlanError:
                self.outcomes["refused"] += not dry_run
                raise
            finally:
                if not dry_run:
                    self.seconds += time.monotonic() - started
            self.last_profile = basis.profile
            proposal = Proposal(plan, basis.live, self.last_gates, trigger, dry_run, affinity)
            self.proposals.add(proposal)
            if not dry_run:
                self.last_plan, self.last_live = plan, basis.live
                self._coordinator.set_priced_exchange(cheaper_exchange(plan))
            return proposal

    def apply(self, plan_id: str, trigger: Trigger, *, force: bool = False) -> tuple[Proposal, Migration | None]:
        """Execute a proposal if it is still current.

        Args:
            force: execute it even if gates were closed when it was made.

        Raises:
            ApiError: there is no such proposal (404).
            PlanError: ranks, placement or accesses have changed since, or a gate was closed.
        """
        proposal = self.proposals.get(plan_id)
        plan_id = proposal.plan.plan_id
        require_current(self.outdated(proposal), plan_id)
        if not force:
            require_open(proposal.gates)
        with self._making:
            require_current(self._drifted(proposal), plan_id)
        return proposal, self.execute(proposal, trigger, force=force)

    def outdated(self, proposal: Proposal) -> str:
        """Return why a proposal can no longer be executed, without evaluating the accesses; empty if it can."""
        return outdated(
            proposal, self._coordinator.live(), self._coordinator.placement(), migrating=self.executions.migrating,
            age_seconds=time.time() - proposal.plan.origin.created_unix_seconds,
        )  # fmt: skip

    def _drifted(self, proposal: Proposal) -> str:
        """Return by how much the target's cost exceeds that of a plan made now; empty up to the drift threshold."""
        threshold = self._settings.drift_threshold
        if threshold is None:
            return ""
        plan, basis, _ = self._make("apply", checked=False)
        beyond = basis.drift(plan.target, proposal.plan.target).reason_to_plan(threshold)
        return "" if beyond is None else f"the accesses have moved on since it was made: {beyond}"

    def explain(self, table: str, row: int | None, hottest: int) -> tuple[TableExplanation, tuple[Gate, ...]]:
        """Explain a plan made now for one row of a table, or for its hottest rows, and return it with the gates.

        The plan is made even if gates are closed, is not recorded, and moves nothing.

        Raises:
            PlanError: no plan can be made, or the table was not looked up yet.
        """
        with self._making:
            plan, basis, _ = self._make("explain", checked=False)
            measured = self.last_gates
        explained = explain(
            plan, basis.profile, basis.live, basis.keyspace, basis.topology.layout,
            horizon_steps=self._settings.horizon_steps, table=table, rows=None if row is None else [row],
            hottest=hottest, limits=plan_limits(self._settings, basis.job), shape=basis.job.shape,
        )  # fmt: skip
        return explained, measured

    def _make(
        self, reason: str, *, checked: bool, moves: bool = False
    ) -> tuple[Plan, PlanBasis, AffinityOutlook | None]:
        """Make a plan of copies; with ``moves`` also learn homes by affinity, and add the rows that move."""
        settings = self._settings
        basis = self.maker.basis(settings)
        self._profiled_at = time.monotonic()
        self.last_gates = evaluate_gates(basis.profile, settings)
        if checked:
            require_open(self.last_gates)
        self._serial += 1
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self._serial}"
        plan = basis.plan(settings, name, self.executions.live_plan_id, reason)
        affinity = None
        if moves:
            plan, affinity = plan_moves(plan, basis, settings, self.affinity)
        self.last_gates = (*self.last_gates, saving_gate(plan, settings.min_saving))
        return plan, basis, affinity

    def execute(self, proposal: Proposal, trigger: Trigger | None = None, *, force: bool = False) -> Migration | None:
        """Start the plan's migration, which supersedes a running one.

        Returns None if nothing is moved: the plan changes nothing, or it is withheld.

        Args:
            trigger: the trigger of the migration; by default that of the plan.
            force: execute it even if it saves less than ``planner.min_saving``.

        Raises:
            PlanError: not all ranks are ready.
            ControlError: the coordinator is stopping.
        """
        plan, trigger = proposal.plan, trigger or proposal.trigger
        if proposal.withheld and not force:
            self._withhold(proposal, trigger)
            return None
        self.withheld = ""
        if len(plan.delta) == 0:
            self.proposals.remove(plan.plan_id)
            self._on_executed()
            self.outcomes["unchanged"] += 1
            return None
        overridden = tuple(gate.name for gate in proposal.closed_gates)
        migration = self.executions.start(plan, trigger, overridden)
        self.proposals.remove(plan.plan_id)
        self._on_executed()
        self.outcomes["changed"] += 1
        self.overridden.update(overridden)
        self._withheld_said = False
        return migration

    def _withhold(self, proposal: Proposal, trigger: Trigger) -> None:
        self.withheld = proposal.withheld
        self.proposals.remove(proposal.plan.plan_id)
        self._on_executed()
        self.outcomes["withheld"] += 1
        if not self._withheld_said:
            self._withheld_said = True
            self._on_withheld(trigger.requested_by, f"{trigger.reason}: {proposal.withheld}")
