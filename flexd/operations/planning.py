"""Make plans from the current profile, keep them as proposals, and turn them into migrations."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from flexd.config.model import Config
from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator import Coordinator, LiveTopology
from flexd.control.daemon.migration import Migration
from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.operations.affinity import AffinityMonitor
from flexd.operations.drift import ProfileMaker
from flexd.operations.executions import Executions
from flexd.operations.live_plan import (
    TrainingJob,
    cheaper_exchange,
    make_live_plan,
    plan_limits,
    plan_moves,
)
from flexd.operations.live_prices import LivePrices
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
from flexd.operations.training_monitor import TrainingMonitor
from flexd.operations.triggers import Trigger
from flexd.planner.affinity.outlook import AffinityOutlook
from flexd.planner.drift import compare_placements
from flexd.planner.explain import TableExplanation, explain
from flexd.planner.plan import Plan
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster

PLAN_OUTCOMES = ("changed", "unchanged", "withheld", "refused")
"""``withheld``: the plan would have saved less than ``planner.min_saving``."""


class Planning:
    """Makes, keeps and executes plans, one at a time, and counts them. Thread-safe.

    Args:
        prices: the cluster that prices plans.
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
        keyspace: KeySpace,
        prices: LivePrices,
        profile: ProfileMaker,
        coordinator: Coordinator,
        training: TrainingMonitor,
        executions: Executions,
        on_executed: Callable[[], None] = lambda: None,
        on_withheld: Callable[[str, str], None] = lambda requested_by, reason: None,
        affinity: AffinityMonitor | None = None,
    ) -> None:
        self.affinity = affinity
        self._config = config
        self._keyspace = keyspace
        self.prices = prices
        self._profile = profile
        self._coordinator = coordinator
        self._training = training
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

    @property
    def cluster(self) -> Cluster:
        """The cluster that prices plans now."""
        return self.prices.cluster

    @property
    def _settings(self) -> PlannerConfig:
        return self._config.planner

    @property
    def _job(self) -> TrainingJob:
        """How the live ranks train."""
        live = self._coordinator.live()
        trainer = None if live is None else live.trainer
        return TrainingJob.of(trainer, self._keyspace.tables, self._training.passes_per_step())

    def check(self, config: Config) -> None:
        """Raise PlanError if ``config`` names tables or rows that do not exist."""
        plan_limits(config.planner, TrainingJob()).check(self._keyspace)

    def apply_config(self, config: Config) -> None:
        """Use other settings from the next plan on."""
        self._config = config
        self.executions.apply_config(config.control)

    def profile_age_seconds(self) -> float:
        """Seconds since the newest profile was made; NaN before the first."""
        return time.monotonic() - self._profiled_at

    def live_topology(self) -> LiveTopology:
        live = self._coordinator.live()
        if live is None or not live.ready:
            raise PlanError(
                f"no plan without ranks: {self._coordinator.status().reason}",
                remedy="start the training, or check that it uses this daemon's control address",
            )
        return live

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
                plan, profile, live, _, affinity = self._make(trigger.reason, checked=checked, moves=True)
            except PlanError:
                self.outcomes["refused"] += not dry_run
                raise
            finally:
                if not dry_run:
                    self.seconds += time.monotonic() - started
            self.last_profile = profile
            proposal = Proposal(plan, live, self.last_gates, trigger, dry_run, affinity)
            self.proposals.add(proposal)
            if not dry_run:
                self.last_plan, self.last_live = plan, live
                self._coordinator.set_priced_exchange(cheaper_exchange(plan))
            return proposal

    def _per_step(self, topology: LiveTopology) -> float:
        per_step = self.accesses_per_step(topology.layout.world_size)
        if not per_step:
            raise PlanError(
                "the accesses of a training step are not known yet",
                remedy="wait for the ranks' first report, or set planner.batch_accesses_per_step",
            )
        return per_step

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
            proposal, self._coordinator.live(), self._coordinator.placement(), migrating=self.migrating(),
            age_seconds=time.time() - proposal.plan.origin.created_unix_seconds,
        )  # fmt: skip

    def _drifted(self, proposal: Proposal) -> str:
        """Return by how much the target's cost exceeds that of a plan made now; empty up to the drift threshold."""
        threshold = self._config.planner.drift_threshold
        if threshold is None:
            return ""
        plan, profile, _, layout, _ = self._make("apply", checked=False)
        job, cluster = self._job, self.cluster
        drift = compare_placements(
            profile, self._keyspace, layout, cluster, plan.target, proposal.plan.target, job.shape, job.exchange
        )
        beyond = drift.reason_to_plan(threshold)
        return "" if beyond is None else f"the accesses have moved on since it was made: {beyond}"

    def explain(self, table: str, row: int | None, hottest: int) -> tuple[TableExplanation, tuple[Gate, ...]]:
        """Explain a plan made now for one row of a table, or for its hottest rows, and return it with the gates.

        The plan is made even if gates are closed, is not recorded, and moves nothing.

        Raises:
            PlanError: no plan can be made, or the table was not looked up yet.
        """
        with self._making:
            plan, profile, live, layout, _ = self._make("explain", checked=False)
            measured = self.last_gates
        settings, job = self._settings, self._job
        explained = explain(
            plan, profile, live, self._keyspace, layout,
            horizon_steps=settings.horizon_steps, table=table,
            rows=None if row is None else [row], hottest=hottest, limits=plan_limits(settings, job),
            shape=job.shape,
        )  # fmt: skip
        return explained, measured

    def accesses_per_step(self, world_size: int) -> float | None:
        """Return the accesses of the whole job per step with so many ranks; None if not known yet."""
        return self._training.accesses_per_step(world_size) or self._config.planner.batch_accesses_per_step

    def migrating(self) -> bool:
        """Return whether the ranks are moving to another placement."""
        return self.executions.migrating

    def _make(
        self, reason: str, *, checked: bool, moves: bool = False
    ) -> tuple[Plan, Profile, Placement, RankLayout, AffinityOutlook | None]:
        """Make a plan of copies; with ``moves`` also learn homes by affinity, and add the rows that move."""
        topology = self.live_topology()
        settings, job = self._settings, self._job
        per_step = self._per_step(topology)
        profile = self._profile(per_step, topology.layout)
        self._profiled_at = time.monotonic()
        self.last_gates = evaluate_gates(profile, settings)
        if checked:
            require_open(self.last_gates)
        live = self._coordinator.placement()
        self._serial += 1
        plan = make_live_plan(
            profile, self._keyspace, topology, self.cluster, live, settings, job,
            plan_id=f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self._serial}", parent_id=self.executions.live_plan_id,
            reason=reason, step_seconds=self._training.step_seconds(),
        )  # fmt: skip
        affinity = None
        if moves:
            plan, affinity = plan_moves(
                plan, live, self._keyspace, topology, settings, job.at_owner, self.affinity, per_step
            )
        self.last_gates = (*self.last_gates, saving_gate(plan, settings.min_saving))
        return plan, profile, live, topology.layout, affinity

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
        migration = self.executions.start(plan, trigger, overridden, self.live_topology())
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
