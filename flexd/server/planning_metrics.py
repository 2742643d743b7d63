"""What planning waits for and what holds migrations back, on the metrics page."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from flexd.api.families import counter, counters, gauge, gauges
from flexd.server.figures import DecisionFigures, PlanningFigures, ThrottleFigures


def planning_metrics(planning: PlanningFigures) -> Iterator[Metric]:
    yield gauge("flexd_planner_auto", "1 if plans of the daemon's own are carried out, 0 if proposed.", planning.auto)
    yield gauge("flexd_maintenance_window_open", "1 while automatic migrations may start.", planning.window_open)
    yield counters("flexd_plan_triggers", "Plans asked for, by what asked.", "trigger", planning.triggers)
    yield gauge("flexd_plan_proposals", "Plans that are kept for flexd apply.", planning.proposals)
    for name, text, place in (
        ("flexd_plan_gate_open", "1 if enough is known of this to plan.", 0),
        ("flexd_plan_gate_measured", "What the gate looks at, in the newest profile.", 1),
        ("flexd_plan_gate_required", "The configured bound.", 2),
    ):
        yield gauges(name, text, "gate", {gate: values[place] for gate, values in planning.gates.items()})
    yield counters("flexd_plan_gates_overridden", "Plans carried out all the same.", "gate", planning.overridden)


def decision_metrics(decisions: DecisionFigures) -> Iterator[Metric]:
    yield counter(
        "flexd_decisions_failures", "Writes of decisions.json that failed, and are tried again.", decisions.failures
    )
    yield counter(
        "flexd_decisions_quarantined",
        "Files of decisions that were not usable and were quarantined.",
        decisions.quarantined,
    )


def throttle_metrics(throttle: ThrottleFigures) -> Iterator[Metric]:
    yield gauge("flexd_throttle_bytes_per_step", "Limit in effect; NaN: the ranks' own alone.", throttle.bytes_per_step)
    yield gauge("flexd_throttle_bytes_per_second", "Limit; NaN without one.", throttle.bytes_per_second)
    yield gauge("flexd_throttle_adaptive", "1 if step times slow migrations down.", throttle.adaptive)
    yield gauge("flexd_throttle_paused", "1 while the adaptive controller holds a chunk back.", throttle.paused)
    yield counter("flexd_throttle_released_bytes", "Row values and state let go.", throttle.released_bytes)
    yield counter("flexd_throttle_released_chunks", "Chunks let go.", throttle.released_chunks)
    yield counters(
        "flexd_throttle_waiting_seconds", "Time in which a chunk was held, by what it waited for.", "wait",
        throttle.waiting_seconds,
    )  # fmt: skip
    yield counters("flexd_throttle_decisions", "Of the adaptive controller.", "decision", throttle.decisions)
    steps = GaugeMetricFamily(
        "flexd_throttle_step_seconds",
        "Seconds of a training step without a migration and at the newest judgement of one; NaN if not known.",
        labels=["steps", "point"],
    )
    for (kind, point), seconds in throttle.step_seconds.items():
        steps.add_metric([kind, point], seconds)
    yield steps
