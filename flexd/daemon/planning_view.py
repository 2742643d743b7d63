"""Planning and throttle as the admin API and the metrics page tell them. Reads, never changes."""

from __future__ import annotations

import math
import time

from flexd.api.planning import GateReport, PlanningStatus, ProposalReport
from flexd.api.throttle import StepTimeReport, ThrottleStatus
from flexd.control.daemon.pace import StepTimes
from flexd.control.daemon.throttle import ThrottleReason
from flexd.daemon.label_values import with_zeros
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.gates import GATE_NAMES, Gate
from flexd.operations.pacing import PacingSnapshot
from flexd.operations.planning import Planning
from flexd.operations.proposals import Proposal
from flexd.operations.triggers import TriggerKind
from flexd.server.figures import PlanningFigures, ThrottleFigures


def gate_report(gate: Gate) -> GateReport:
    return GateReport(
        gate=gate.name, key=gate.key, measured=gate.measured, required=gate.required, at_most=gate.at_most,
        open=gate.open, words="" if gate.open else gate.problem,
    )  # fmt: skip


def proposal_report(proposal: Proposal, outdated: str) -> ProposalReport:
    plan = proposal.plan
    return ProposalReport(
        plan_id=plan.plan_id,
        created_unix_seconds=plan.created_unix_seconds,
        trigger=proposal.trigger.kind.value,
        reason=proposal.trigger.reason,
        dry_run=proposal.dry_run,
        promotions=plan.promotions,
        demotions=plan.demotions,
        migration_bytes=plan.migration_bytes,
        saved_seconds=plan.before.exposed_seconds - plan.after.exposed_seconds,
        closed_gates=tuple(gate.name for gate in proposal.closed_gates),
        outdated=outdated or None,
    )


def proposal_reports(planning: Planning) -> tuple[ProposalReport, ...]:
    """Newest first."""
    return tuple(proposal_report(each, planning.outdated(each)) for each in reversed(planning.proposals.all()))


def planning_status(planning: Planning, auto: AutoPlanner) -> PlanningStatus:
    triggers, now = auto.triggers, time.time()
    settings, waiting = triggers.settings, triggers.waiting_for_window
    return PlanningStatus(
        auto=settings.auto,
        held=triggers.held(now) or None,
        window_open=settings.calendar.is_open(now),
        window_changes_unix_seconds=settings.calendar.next_change(now),
        waiting_for_window=None if waiting is None else waiting.reason,
        refused=auto.refusal or None,
        gates=tuple(gate_report(gate) for gate in planning.last_gates),
        triggers={kind.value: triggers.fired[kind] for kind in TriggerKind},
        proposals=proposal_reports(planning),
    )


def planning_figures(planning: Planning, auto: AutoPlanner) -> PlanningFigures:
    triggers, now = auto.triggers, time.time()
    return PlanningFigures(
        auto=triggers.settings.auto,
        window_open=triggers.settings.calendar.is_open(now),
        triggers={kind.value: triggers.fired[kind] for kind in TriggerKind},
        gates={gate.name: (gate.open, gate.measured, gate.required) for gate in planning.last_gates},
        overridden=with_zeros(GATE_NAMES, planning.overridden),
        proposals=len(planning.proposals.all()),
    )


def _times(times: StepTimes | None) -> StepTimeReport | None:
    return None if times is None else StepTimeReport(p50_seconds=times.p50_seconds, p90_seconds=times.p90_seconds)


def throttle_status(figures: PacingSnapshot) -> ThrottleStatus:
    throttle = figures.throttle
    return ThrottleStatus(
        bytes_per_step=figures.limits.bytes_per_step,
        bytes_per_second=figures.limits.bytes_per_second,
        adaptive=figures.adaptive,
        effective_bytes_per_step=figures.bytes_per_step,
        state=None if figures.state is None else figures.state.value,
        why=figures.why or None,
        waits_for=None if throttle.waits_for is None else throttle.waits_for.value,
        waiting_seconds={wait.value: throttle.waiting_seconds[wait] for wait in ThrottleReason},
        released_bytes=throttle.released_bytes,
        baseline=_times(figures.baseline),
        recent=_times(figures.recent),
        decisions={"slowed": figures.slowed, "sped": figures.sped, "paused": figures.pauses},
    )


def throttle_figures(figures: PacingSnapshot) -> ThrottleFigures:
    throttle = figures.throttle
    quantiles = {
        (kind, name): math.nan if times is None else getattr(times, f"{name}_seconds")
        for kind, times in (("without_migration", figures.baseline), ("migrating", figures.recent))
        for name in ("p50", "p90")
    }
    return ThrottleFigures(
        bytes_per_step=math.nan if figures.bytes_per_step is None else figures.bytes_per_step,
        bytes_per_second=math.nan if figures.limits.bytes_per_second is None else figures.limits.bytes_per_second,
        adaptive=figures.adaptive,
        paused=throttle.waits_for is ThrottleReason.PAUSE,
        released_bytes=throttle.released_bytes,
        released_chunks=throttle.released_chunks,
        waiting_seconds={wait.value: throttle.waiting_seconds[wait] for wait in ThrottleReason},
        decisions={"slowed": figures.slowed, "sped": figures.sped, "paused": figures.pauses},
        step_seconds=quantiles,
    )
