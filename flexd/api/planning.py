"""When the daemon plans, what it waits for, the plans that it keeps, and their measured effects."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from flexd.control.daemon.migration_record import VerificationReport
from flexd.core.model import DETAIL, FiniteOrNone, Model, counter, gauge, summary, with_zeros

if TYPE_CHECKING:
    from flexd.operations.autoplan import AutoPlanner
    from flexd.operations.planning import Gate, Planning, Proposal
    from flexd.operations.verification import Verifier


class VerificationStatus(Model):
    """Measurement of executed plans; counters run since the daemon started."""

    enabled: bool = False
    """``planner.verify.enabled``."""
    newest: VerificationReport | None = None
    """The running verification, or the newest one; null before the first."""
    ended: dict[str, int] = Field(default_factory=dict)
    """Ended verifications by state."""
    held: tuple[str, ...] = ()
    """Reasons why kinds of plans are not carried out by the daemon itself, because one was not shown to win."""

    FAMILIES = (
        counter("flexd_verifications", "Verifications of executed plans ended, by state.", "ended", ("state",)),
        gauge(
            "flexd_verification_change_ratio",
            "Measured change of the step time by the newest verified plan, as a share; below 0 is faster.",
            lambda verified: verified.newest and verified.newest.change,
        ),
        gauge(
            "flexd_verification_held_kinds", "Kinds of plans held back: one was not shown to win.",
            lambda verified: len(verified.held),
        ),
    )  # fmt: skip


def verification_status(verifier: Verifier | None) -> VerificationStatus:
    """Return what was measured of executed plans."""
    from flexd.operations.verification import VerificationState

    if verifier is None:
        return VerificationStatus()
    ended = (state.value for state in VerificationState if state is not VerificationState.RUNNING)
    return VerificationStatus(
        enabled=verifier.settings.enabled,
        newest=verifier.newest,
        ended=with_zeros(ended, verifier.ended),
        held=verifier.decisions.held_reasons(),
    )


TriggerName = Literal["interval", "drift", "topology", "manual", "verify"]


class GateReport(Model):
    """One measure that must be good enough before a plan is made."""

    gate: str
    """``samples``, ``coverage``, ``lag`` or ``saving`` (of the plan itself)."""
    key: str
    """Key of the configuration."""
    measured: FiniteOrNone = None
    """Accesses, share, messages or seconds per step, by the gate."""
    required: FiniteOrNone = None
    """The bound."""
    at_most: bool = False
    """True for an upper bound."""
    open: bool = True
    """True if this gate allows a plan."""
    message: str = ""
    """The fault, if the gate is closed."""


class ProposalReport(Model):
    """A plan that is kept for ``flexd apply``."""

    plan_id: str
    """Argument of ``flexd apply``."""
    created_unix_seconds: FiniteOrNone = None
    """When it was made."""
    trigger: Annotated[TriggerName, DETAIL] = "manual"
    """Its trigger."""
    reason: str = ""
    """The trigger in words."""
    dry_run: bool = False
    """True for a requested dry run, False for a proposal of the daemon."""
    promotions: int = 0
    """Rows that get more copies."""
    demotions: int = 0
    """Rows that lose copies."""
    migration_bytes: int = 0
    """Row values and optimizer state that it would copy."""
    saved_seconds: FiniteOrNone = None
    """Predicted saving of a step's exposed communication."""
    saved_share: FiniteOrNone = None
    """The saving as a share of the measured step; null if that is not known."""
    closed_gates: tuple[str, ...] = ()
    """Gates that only ``--force`` overrides."""
    outdated: str | None = None
    """Reason why it cannot be carried out any more; null if it can."""


class ProposalList(Model):
    """The kept plans, newest first."""

    proposals: tuple[ProposalReport, ...] = ()
    """At most four dry runs and four of the daemon's own."""


class PlanningStatus(Model):
    """When the daemon plans by itself, and what holds it back; counters run since the daemon started."""

    auto: bool = True
    """True if plans are carried out, False if they are proposed only."""
    held: str | None = None
    """Reason why the daemon starts no migration by itself now; null if it does."""
    failure_backoff_seconds: float = 0.0
    """Time for which a failed migration holds the daemon's next plan back."""
    window_open: bool = True
    """True while the maintenance windows allow automatic migrations."""
    window_changes_unix_seconds: FiniteOrNone = None
    """When that changes next; null if it does not within two weeks."""
    waiting_for_window: str | None = None
    """The trigger that fires when the window opens."""
    refused: str | None = None
    """Reason why the newest attempt made no plan; null if it did."""
    withheld: str | None = None
    """Reason why the newest plan moved nothing although the placement differs: it would save too little; null if it was
    not withheld."""
    gates: tuple[GateReport, ...] = ()
    """Gates of the newest profile; empty before the first."""
    gates_overridden: dict[str, int] = Field(default_factory=dict)
    """Plans carried out with a closed gate, by gate."""
    triggers: dict[TriggerName, int] = Field(default_factory=dict)
    """Plans requested, by trigger."""
    plans: dict[str, int] = Field(default_factory=dict)
    """Plans requested, by outcome: ``changed``, ``unchanged``, ``withheld``, ``refused``."""
    planning_seconds: float = 0.0
    """Wall time of all planning."""
    proposals: tuple[ProposalReport, ...] = ()
    """Kept plans, newest first."""
    verification: VerificationStatus = VerificationStatus()
    """Measured effects of executed plans."""

    FAMILIES = (
        counter("flexd_plans", "Plans requested, by outcome.", "plans", ("outcome",)),
        summary(
            "flexd_plan_duration_seconds", "Wall time of planning.",
            lambda planning: (sum(planning.plans.values()), planning.planning_seconds),
        ),
        gauge("flexd_planner_auto", "1 if plans of the daemon's own are carried out, 0 if proposed.", "auto"),
        gauge("flexd_maintenance_window_open", "1 while automatic migrations may start.", "window_open"),
        counter("flexd_plan_triggers", "Plans requested, by trigger.", "triggers", ("trigger",)),
        gauge(
            "flexd_plan_proposals", "Plans that are kept for flexd apply.", lambda planning: len(planning.proposals)
        ),
        gauge(
            "flexd_plan_gate_open", "1 if the gate allows a plan.",
            lambda planning: {gate.gate: float(gate.open) for gate in planning.gates}, ("gate",),
        ),
    )  # fmt: skip


def gate_report(gate: Gate) -> GateReport:
    """Return a gate as measured on a profile."""
    return GateReport.from_object(gate, gate=gate.name, message="" if gate.open else gate.problem)


def proposal_list(planning: Planning) -> ProposalList:
    """Return the kept plans, newest first."""
    kept = reversed(planning.proposals.all())
    return ProposalList(proposals=tuple(_proposal_report(each, planning.outdated(each)) for each in kept))


def planning_status(planning: Planning, auto: AutoPlanner) -> PlanningStatus:
    """Return when the daemon plans, and what holds it back."""
    from flexd.operations.executions import TriggerKind
    from flexd.operations.planning import GATE_NAMES, PLAN_OUTCOMES

    triggers, now = auto.triggers, time.time()
    settings, waiting = triggers.settings, triggers.waiting_for_window
    failure_backoff_seconds, held_off = auto.held_off()
    return PlanningStatus(
        auto=settings.auto,
        held=triggers.held(now) or held_off or None,
        failure_backoff_seconds=failure_backoff_seconds,
        window_open=triggers.calendar.is_open(now),
        window_changes_unix_seconds=triggers.calendar.next_change(now),
        waiting_for_window=None if waiting is None else waiting.reason,
        refused=auto.refusal or None,
        withheld=planning.withheld or None,
        gates=tuple(gate_report(gate) for gate in planning.last_gates),
        gates_overridden=with_zeros(GATE_NAMES, planning.overridden),
        triggers={kind.value: triggers.fired[kind] for kind in TriggerKind},
        plans=with_zeros(PLAN_OUTCOMES, planning.outcomes),
        planning_seconds=planning.seconds,
        proposals=proposal_list(planning).proposals,
        verification=verification_status(auto.verifier),
    )


def _proposal_report(proposal: Proposal, outdated: str) -> ProposalReport:
    plan = proposal.plan
    return ProposalReport.from_object(
        plan,
        created_unix_seconds=plan.origin.created_unix_seconds,
        trigger=proposal.trigger.kind.value,
        reason=proposal.trigger.reason,
        dry_run=proposal.dry_run,
        closed_gates=tuple(gate.name for gate in proposal.closed_gates),
        outdated=outdated or None,
    )
