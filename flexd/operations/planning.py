"""Make plans from the current profile, keep them as proposals, and turn them into migrations.

Gates refuse plans from a profile that is too thin, and withhold plans that save too little to be measured: either would
move rows because of noise.
"""

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from flexd.config.model import Config
from flexd.config.sections import MinSavingConfig, PlanGatesConfig
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.migration import GateReport, Migration, MigrationRecord
from flexd.core.errors import ApiError, PlanError
from flexd.core.placement import Placement
from flexd.operations.affinity import AffinityMonitor
from flexd.operations.executions import Executions, Trigger
from flexd.operations.live_plan import PlanBasis, PlanMaker, TrainingJob, cheaper_exchange, plan_limits, plan_moves
from flexd.planner.affinity.outlook import AffinityOutlook
from flexd.planner.explain import TableExplanation, explain
from flexd.planner.plan import Plan
from flexd.sketch.profile import Profile

SAVING = "saving"
"""The gate that is measured on the plan; the others are measured on its profile."""
# By gate: how to open it.
_REMEDIES = {
    "samples": "wait for more of the stream, or lower planner.min_samples",
    "coverage": "raise sketch.memory_bytes or sketch.max_hot_rows, or lower planner.min_coverage",
    "lag": "wait until the daemon has caught up, lower stream.source.share, or raise planner.max_lag_messages",
    SAVING: "nothing to do: the live placement stays; lower planner.min_saving to move rows for less",
}
GATE_NAMES = tuple(_REMEDIES)


def _gate(name: str, key: str, measured: float, required: float, problem: str, at_most: bool = False) -> GateReport:
    is_open = measured <= required if at_most else measured >= required
    return GateReport(
        gate=name, key=key, measured=measured, required=required, at_most=at_most, open=is_open,
        message="" if is_open else problem,
    )  # fmt: skip


def evaluate_gates(profile: Profile, settings: PlanGatesConfig) -> tuple[GateReport, ...]:
    """Return the gates of a profile, open and closed, in the order of ``GATE_NAMES``."""
    seen = [table for table in profile.tables if table.weight > 0]
    weight = sum(table.weight for table in seen)
    coverage = sum(table.coverage * table.weight for table in seen) / weight if weight else 0.0
    return (
        _gate(
            "samples", "planner.min_samples", profile.samples, settings.min_samples,
            f"the profile is thin: {profile.samples} accesses seen, planner.min_samples is {settings.min_samples}",
        ),
        _gate(
            "coverage", "planner.min_coverage", coverage, settings.min_coverage,
            f"the profile explains {coverage:.0%} of the accesses, planner.min_coverage is {settings.min_coverage:.0%}",
        ),
        _gate(
            "lag", "planner.max_lag_messages", profile.lag_messages, settings.max_lag_messages,
            f"{profile.lag_messages} messages of the stream are not read yet, planner.max_lag_messages is "
            f"{settings.max_lag_messages}",
            at_most=True,
        ),
    )  # fmt: skip


def saving_gate(plan: Plan, settings: MinSavingConfig) -> GateReport:
    """Return the gate of ``planner.min_saving``.

    Open for a plan that changes nothing, and for one that is needed because the live placement breaks a limit."""
    required = max(settings.seconds, settings.share * (plan.step_seconds or 0.0))
    if len(plan.delta) == 0 or not plan.live_fits:
        required = min(required, plan.saved_seconds)
    share = "" if plan.saved_share is None else f" ({plan.saved_share:.3%} of it)"
    return _gate(
        SAVING, "planner.min_saving", plan.saved_seconds, required,
        f"the plan would save {1e6 * plan.saved_seconds:.3f} us per step{share}, planner.min_saving asks for "
        f"{1e6 * required:.3f} us",
    )  # fmt: skip


def require_open(checked: Sequence[GateReport]) -> None:
    """Raise PlanError naming every closed gate, if there is one."""
    closed = [gate for gate in checked if not gate.open]
    if closed:
        remedies = "; ".join(_REMEDIES[gate.gate] for gate in closed)
        raise PlanError("; ".join(gate.message for gate in closed), remedy=remedies)


LATEST = "latest"
MAX_PER_KIND = 4
MAX_AGE_SECONDS = 3600.0
"""An older proposal is not carried out."""
"""Limit of kept dry runs, and of kept proposals that are none. One of a million replicated rows takes about 27 MB."""


@dataclass(frozen=True)
class Proposal:
    """A plan with everything that decides whether it may still be executed.

    Attributes:
        live: the placement that the plan starts from.
        gates: the gates of its profile.
        trigger: why it was made.
        dry_run: whether it was made for display only.
        affinity: what homes and dealing by affinity would win; None if rows that occur together are not sampled.
    """

    plan: Plan
    live: Placement
    gates: tuple[GateReport, ...]
    trigger: Trigger
    dry_run: bool = False
    affinity: AffinityOutlook | None = None

    @property
    def closed_gates(self) -> tuple[GateReport, ...]:
        return tuple(gate for gate in self.gates if not gate.open)

    @property
    def withheld(self) -> str:
        """Why the plan saves too little to be executed; empty if it does not."""
        return next((gate.message for gate in self.closed_gates if gate.gate == SAVING), "")

    def record(self, trigger: Trigger) -> MigrationRecord:
        """Return the record of the migration that carries the plan out because of ``trigger``."""
        plan = self.plan
        record = trigger.record(plan.plan_id, plan.origin.parent_id, plan.origin.topology_generation)
        return record.model_copy(
            update={
                "overridden_gates": tuple(gate.gate for gate in self.closed_gates), "rows": len(plan.delta),
                "bytes_to_copy": plan.migration_bytes, "promotions": plan.promotions, "demotions": plan.demotions,
                "why": tuple(plan.costs.messages()), "predicted_saving_seconds": plan.saved_seconds,
            }
        )  # fmt: skip


class Proposals:
    """The newest dry runs and the newest other proposals. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Proposal] = OrderedDict()

    def add(self, proposal: Proposal) -> None:
        """Add a proposal and drop the oldest of its kind, so that dry runs never displace the daemon's proposals."""
        with self._lock:
            self._kept[proposal.plan.plan_id] = proposal
            same = [name for name, other in self._kept.items() if other.dry_run == proposal.dry_run]
            for name in same[:-MAX_PER_KIND]:
                del self._kept[name]

    def remove(self, plan_id: str) -> None:
        """Remove a proposal that was executed or can no longer be."""
        with self._lock:
            self._kept.pop(plan_id, None)

    def all(self) -> tuple[Proposal, ...]:
        """Return all proposals, oldest first."""
        with self._lock:
            return tuple(self._kept.values())

    def get(self, plan_id: str) -> Proposal:
        """Return a proposal by id, or the newest for ``LATEST``.

        Raises:
            ApiError: there is no proposal of that id (404).
        """
        kept = {proposal.plan.plan_id: proposal for proposal in self.all()}
        if plan_id == LATEST and kept:
            return next(reversed(kept.values()))
        if plan_id not in kept:
            remedy = f"proposals: {', '.join(kept)}" if kept else "flexd plan makes one"
            raise ApiError(f"no proposal {plan_id[:100]!r}", status=404, remedy=remedy)
        return kept[plan_id]


def require_current(outdated: str, plan_id: str) -> None:
    """Raise PlanError if ``outdated`` gives a reason."""
    if outdated:
        raise PlanError(f"plan {plan_id} is not executed: {outdated}", remedy="flexd plan makes a new one")


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
        self.last_gates: tuple[GateReport, ...] = ()
        self.seconds = 0.0
        self._profiled_at = math.nan
        self.executions = executions

    def check(self, config: Config) -> None:
        """Raise PlanError if ``config`` names tables or rows that do not exist."""
        plan_limits(config.planner, TrainingJob()).check(self.maker.keyspace)

    def apply_config(self, config: Config) -> None:
        """Use other settings from the next plan on."""
        self.maker.settings = config.planner

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
                plan, basis, affinity = self._make(trigger.reason, checked=not (dry_run or force), moves=True)
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
                self._coordinator.priced_exchange = cheaper_exchange(plan)
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
        topology, placement, origin = self._coordinator.live(), self._coordinator.placement(), proposal.plan.origin
        if topology is None or not topology.ready:
            return "not all ranks are ready"
        if topology.generation != origin.topology_generation:
            return (
                f"the ranks have changed: it is for topology generation {origin.topology_generation}, they are at "
                f"{topology.generation}"
            )
        if self.executions.migrating:
            return "a migration is running: it moves what this plan starts from"
        if placement.version != proposal.live.version or placement.digest() != proposal.live.digest():
            return (
                f"the placement has moved on: it starts from version {proposal.live.version}, the ranks are at "
                f"{placement.version}"
            )
        age_seconds = time.time() - origin.created_unix_seconds
        if age_seconds > MAX_AGE_SECONDS:
            return f"it is {age_seconds:.0f} s old, {MAX_AGE_SECONDS:.0f} s at most"
        return ""

    def _drifted(self, proposal: Proposal) -> str:
        """Return by how much the target's cost exceeds that of a plan made now; empty up to the drift threshold."""
        threshold = self.maker.settings.drift_threshold
        if threshold is None:
            return ""
        plan, basis, _ = self._make("apply", checked=False)
        beyond = basis.drift(plan.target, proposal.plan.target).reason_to_plan(threshold)
        return "" if beyond is None else f"the accesses have moved on since it was made: {beyond}"

    def explain(self, table: str, row: int | None, hottest: int) -> tuple[TableExplanation, tuple[GateReport, ...]]:
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
            horizon_steps=basis.settings.horizon_steps, table=table, rows=None if row is None else [row],
            hottest=hottest, limits=basis.limits, shape=basis.job.shape,
        )  # fmt: skip
        return explained, measured

    def _make(
        self, reason: str, *, checked: bool, moves: bool = False
    ) -> tuple[Plan, PlanBasis, AffinityOutlook | None]:
        """Make a plan of copies; with ``moves`` also learn homes by affinity, and add the rows that move."""
        basis = self.maker.basis()
        self._profiled_at = time.monotonic()
        self.last_gates = evaluate_gates(basis.profile, basis.settings)
        if checked:
            require_open(self.last_gates)
        self._serial += 1
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self._serial}"
        plan = basis.plan(name, self.executions.live_plan_id, reason)
        affinity = None
        if moves:
            plan, affinity = plan_moves(plan, basis, self.affinity)
        self.last_gates = (*self.last_gates, saving_gate(plan, basis.settings.min_saving))
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
        self.withheld = "" if force else proposal.withheld
        if self.withheld:
            self._settle(plan, "withheld")
            if not self._withheld_said:
                self._withheld_said = True
                self._on_withheld(trigger.requested_by, f"{trigger.reason}: {self.withheld}")
            return None
        if len(plan.delta) == 0:
            self._settle(plan, "unchanged")
            return None
        migration = self.executions.start(proposal.record(trigger), plan.target, plan)
        self._settle(plan, "changed")
        self.overridden.update(migration.record.overridden_gates)
        self._withheld_said = False
        return migration

    def _settle(self, plan: Plan, outcome: str) -> None:
        self.proposals.remove(plan.plan_id)
        self._on_executed()
        self.outcomes[outcome] += 1
