"""When the daemon plans, and from what: placement, prices, drift, gates, the plans that it keeps and their measured
effects."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flexd.api.base import RowsByTier
from flexd.control.daemon.migration import GateReport, VerificationReport
from flexd.core.model import DETAIL, FiniteOrNone, Model, by_table, counter, gauge, summary, with_zeros

if TYPE_CHECKING:
    from flexd.core.keyspace import KeySpace
    from flexd.core.placement import Placement
    from flexd.operations.autoplan import AutoPlanner, DriftMonitor
    from flexd.operations.live_plan import LivePrices
    from flexd.operations.planning import Planning, Proposal
    from flexd.operations.verification import Verifier


class PlacementStatus(Model):
    """The placement that every rank has agreed on."""

    version: int = 0
    rows: RowsByTier = Field(default_factory=dict)
    rehomed_rows: int = 0
    digest: str = "0" * 16
    """Order-free digest of the hot rows, 16 hexadecimal digits."""
    digest_mismatches: int = 0

    FAMILIES = (
        gauge("flexd_placement_version", "Chunks applied by every rank.", "version"),
        gauge("flexd_placement_rows", "Rows in each tier.", lambda placed: by_metric_tier(placed.rows), ("tier",)),
        gauge(
            "flexd_placement_rehomed_rows",
            "Rows that live in another node than that of their home rank.",
            "rehomed_rows",
        ),
        counter(
            "flexd_placement_digest_mismatches", "Reports whose placement digest was not the daemon's.",
            "digest_mismatches",
        ),
    )  # fmt: skip


def by_metric_tier(rows: RowsByTier) -> dict[str, int]:
    """Return the counts by the tier's label value, in the order of the tiers."""
    return {"home": rows.get("HOME", 0), "node": rows.get("NODE", 0), "device": rows.get("DEVICE", 0)}


def rows_above_home(placement: Placement) -> RowsByTier:
    """Return the number of rows in each replicated tier; all other rows are HOME."""
    from flexd.core.placement import Tier

    return {
        "NODE": int((placement.tiers == Tier.NODE).sum()),
        "DEVICE": int((placement.tiers == Tier.DEVICE).sum()),
    }


def placement_status(placement: Placement, keyspace: KeySpace, digest_mismatches: int) -> PlacementStatus:
    """Return the placement of the rows of all tables."""
    total_rows = keyspace.total_rows
    return PlacementStatus(
        version=placement.version,
        rows={"HOME": total_rows - len(placement.copies), **rows_above_home(placement)},
        rehomed_rows=len(placement.rehomed),
        digest=f"{placement.digest():016x}",
        digest_mismatches=digest_mismatches,
    )


class LinkPrices(Model):
    """One link. Errors are held-out: every report is predicted before it is learnt from; newer reports weigh more."""

    link: str
    """``intra_node`` or ``inter_node``."""
    reports: int = 0
    """Times that enough steps of all ranks were learnt from."""
    factor: float = 1.0
    """Factor of the probed seconds at which plans are priced; 1 unless it predicts better."""
    probed_error: FiniteOrNone = None
    """Held-out error of the prices as probed, as a share of the measured time."""
    corrected_error: FiniteOrNone = None
    """Held-out error with the factor that reports show."""
    reason: str = ""


class PricesStatus(Model):
    """The prices of plans."""

    links: tuple[LinkPrices, ...] = ()

    FAMILIES = (
        gauge(
            "flexd_price_factor", "Factor of the probed seconds of a link at which plans are priced.",
            lambda prices: {link.link: link.factor for link in prices.links}, ("link",),
        ),
        gauge(
            "flexd_price_error",
            "Held-out error as a share of the measured time, of a link's prices as probed and with a factor.",
            lambda prices: {
                (link.link, kind): getattr(link, f"{kind}_error")
                for link in prices.links
                for kind in ("probed", "corrected")
            },
            ("link", "prices"),
        ),
    )  # fmt: skip


def prices_status(prices: LivePrices) -> PricesStatus:
    """Return what was learnt of each link in this topology generation."""
    shown = (
        LinkPrices(
            link=link.value, reports=learnt.reports, factor=learnt.factor, probed_error=learnt.error_shares()[0],
            corrected_error=learnt.error_shares()[1], reason=learnt.reason(),
        )
        for link, learnt in prices.corrections().items()
    )  # fmt: skip
    return PricesStatus(links=tuple(shown))


class TableDriftStatus(Model):
    """Drift of one table. Seconds and bytes are per step at the live placement, without the collectives' latencies."""

    table: str
    ratio: FiniteOrNone = None
    """Exposed seconds of its bytes, at the live placement / with a plan made now; null if that would leave none."""
    exposed_seconds: float = 0.0
    inter_node_bytes: float = 0.0


class DriftStatus(Model):
    """The cost of the live placement over that of the plan that would be made now, since the daemon started.

    Exposed seconds are per step, bytes per rank and step: at the live placement, and with the plan.
    """

    ratio: FiniteOrNone = None
    """Exposed seconds of a step, live / plan: above 1 another placement is better; null before the first
    evaluation."""
    threshold: FiniteOrNone = None
    """Above it a new plan is made, if it saves ``planner.min_saving``; null if drift makes none."""
    plan_exposed_seconds: FiniteOrNone = None
    exposed_seconds: FiniteOrNone = None
    plan_inter_node_bytes: FiniteOrNone = None
    inter_node_bytes: FiniteOrNone = None
    age_seconds: FiniteOrNone = None
    evaluations: int = 0
    evaluation_seconds: float = 0.0
    tables: tuple[TableDriftStatus, ...] = ()

    FAMILIES = (
        gauge(
            "flexd_drift_ratio",
            "Exposed communication of a step at the live placement / with the plan that would be made now; NaN before "
            "the first evaluation.",
            lambda drift: _ratio(drift.ratio, drift.exposed_seconds),
        ),
        gauge(
            "flexd_drift_exposed_seconds",
            "Exposed communication of a step at the live placement, and with the plan that would be made now.",
            lambda drift: {"plan": drift.plan_exposed_seconds, "live": drift.exposed_seconds}, ("placement",),
        ),
        gauge(
            "flexd_table_drift_ratio",
            "Exposed communication of each table's bytes at the live placement / with the plan that would be made now.",
            lambda drift: {table.table: _ratio(table.ratio, table.exposed_seconds) for table in drift.tables},
            ("table",),
        ),
        gauge(
            "flexd_table_exposed_seconds",
            "Exposed communication of each table's bytes per step at the live placement, now, without latencies.",
            by_table("exposed_seconds"), ("table",),
        ),
        summary(
            "flexd_drift_evaluation_duration_seconds", "Wall time of evaluating drift.",
            lambda drift: (drift.evaluations, drift.evaluation_seconds),
        ),
    )  # fmt: skip


def drift_status(monitor: DriftMonitor, threshold: float | None) -> DriftStatus:
    """Return the newest evaluation of drift."""
    drift, compared = monitor.newest, dict[str, Any]()
    if drift is not None:
        (plan_seconds, live_seconds), (plan_bytes, live_bytes) = drift.exposed_seconds, drift.inter_node_bytes
        by_table = zip(drift.table_ratios.items(), drift.table_seconds[1], drift.table_bytes[1], strict=True)
        compared = {
            "ratio": drift.ratio,
            "plan_exposed_seconds": float(plan_seconds),
            "exposed_seconds": float(live_seconds),
            "plan_inter_node_bytes": float(plan_bytes),
            "inter_node_bytes": float(live_bytes),
            "tables": tuple(
                TableDriftStatus(table=name, ratio=ratio, exposed_seconds=float(seconds), inter_node_bytes=float(sent))
                for (name, ratio), seconds, sent in by_table
            ),
        }
    return DriftStatus(
        threshold=threshold,
        age_seconds=monitor.age_seconds(),
        evaluations=monitor.evaluations,
        evaluation_seconds=monitor.seconds,
        **compared,
    )


def _ratio(ratio: float | None, live: float | None) -> float | None:
    """Restore the infinity, which the model cannot express, of a cost that the plan would end."""
    return math.inf if ratio is None and live else ratio


class VerificationStatus(Model):
    """Measurement of executed plans; counters run since the daemon started."""

    budget_steps: int = 0
    """``planner.verify_budget_steps``; 0: plans are not measured."""
    newest: VerificationReport | None = None
    """The running verification, or the newest one; null before the first."""
    ended: dict[str, int] = Field(default_factory=dict)
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
            "flexd_verification_held_kinds", "Kinds of plans held back: one was rolled back, as measured or by a user.",
            lambda verified: len(verified.held),
        ),
    )  # fmt: skip


def verification_status(verifier: Verifier | None) -> VerificationStatus:
    """Return what was measured of executed plans."""
    from flexd.core.switchback import Verdict
    from flexd.operations.verification import INTERRUPTED

    if verifier is None:
        return VerificationStatus()
    ended = (*(verdict.value for verdict in Verdict), INTERRUPTED)
    return VerificationStatus(
        budget_steps=verifier.budget_steps,
        newest=verifier.newest,
        ended=with_zeros(ended, verifier.ended),
        held=verifier.decisions.held_reasons(),
    )


TriggerName = Literal["interval", "drift", "topology", "manual", "verify"]


class ProposalReport(Model):
    """A plan that is kept for ``flexd apply``; figures as in ``PlanReport``."""

    plan_id: str
    created_unix_seconds: FiniteOrNone = None
    trigger: Annotated[TriggerName, DETAIL] = "manual"
    reason: str = ""
    """The trigger in words."""
    dry_run: bool = False
    """True for a requested dry run, False for a proposal of the daemon."""
    promotions: int = 0
    demotions: int = 0
    migration_bytes: int = 0
    saved_seconds: FiniteOrNone = None
    saved_share: FiniteOrNone = None
    closed_gates: tuple[str, ...] = ()
    """Gates that only ``--force`` overrides."""
    outdated: str | None = None
    """Reason why it cannot be carried out any more; null if it can."""


class ProposalList(Model):
    """The kept plans, newest first."""

    proposals: tuple[ProposalReport, ...] = ()
    """At most four dry runs and four of the daemon's own."""


class WindowStatus(Model):
    """The maintenance windows."""

    open: bool = True
    changes_unix_seconds: FiniteOrNone = None
    """When that changes next; null if it does not within two weeks."""
    waiting: str | None = None
    """The trigger that fires when the window opens."""

    FAMILIES = (gauge("flexd_maintenance_window_open", "1 while automatic migrations may start.", "open"),)


class PlanningStatus(Model):
    """When the daemon plans by itself, and what holds it back; counters run since the daemon started."""

    auto: bool = True
    held: str | None = None
    """Reason why the daemon starts no migration by itself now; null if it does."""
    window: WindowStatus = WindowStatus()
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
    plans: dict[str, int] = Field(default_factory=dict)
    """Plans requested, by outcome: ``changed``, ``unchanged``, ``withheld``, ``refused``."""
    planning_seconds: float = 0.0
    proposals: tuple[ProposalReport, ...] = ()
    verification: VerificationStatus = VerificationStatus()

    FAMILIES = (
        counter("flexd_plans", "Plans requested, by outcome.", "plans", ("outcome",)),
        summary(
            "flexd_plan_duration_seconds", "Wall time of planning.",
            lambda planning: (sum(planning.plans.values()), planning.planning_seconds),
        ),
        gauge("flexd_planner_auto", "1 if plans of the daemon's own are carried out, 0 if proposed.", "auto"),
        counter("flexd_plan_triggers", "Plans requested, by trigger.", "triggers", ("trigger",)),
        gauge(
            "flexd_plan_proposals", "Plans that are kept for flexd apply.", lambda planning: len(planning.proposals)
        ),
        gauge(
            "flexd_plan_gate_open", "1 if the gate allows a plan.",
            lambda planning: {gate.gate: float(gate.open) for gate in planning.gates}, ("gate",),
        ),
    )  # fmt: skip


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
    return PlanningStatus(
        auto=settings.auto,
        held=triggers.held(now) or auto.held_off() or None,
        window=WindowStatus(
            open=triggers.calendar.is_open(now),
            changes_unix_seconds=triggers.calendar.next_change(now),
            waiting=None if waiting is None else waiting.reason,
        ),
        refused=auto.refusal or None,
        withheld=planning.withheld or None,
        gates=planning.last_gates,
        gates_overridden=with_zeros(GATE_NAMES, planning.overridden),
        triggers={kind.value: triggers.fired[kind] for kind in TriggerKind},
        plans=with_zeros(PLAN_OUTCOMES, planning.outcomes),
        planning_seconds=planning.seconds,
        proposals=proposal_list(planning).proposals,
        verification=verification_status(auto.verifier),
    )


def _proposal_report(proposal: Proposal, outdated: str) -> ProposalReport:
    return ProposalReport.model_validate(
        {
            **proposal.plan.summary,
            "trigger": proposal.trigger.kind.value,
            "reason": proposal.trigger.reason,
            "dry_run": proposal.dry_run,
            "closed_gates": tuple(gate.gate for gate in proposal.closed_gates),
            "outdated": outdated or None,
        }
    )
