"""Drift: the live placement against the plan that would be made now."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flexd.api.base import FiniteOrNone, Model
from flexd.api.families import gauge, gauges, summary

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.operations.drift import DriftMonitor


class TableDriftStatus(Model):
    """Drift of one table."""

    table: str
    """Name of the table."""
    ratio: FiniteOrNone = None
    """Exposed seconds of its bytes, at the live placement / with a plan made now; null if that would leave none."""
    exposed_seconds: float = 0.0
    """Per step, at the live placement; without the collectives' latencies."""
    inter_node_bytes: float = 0.0
    """Per rank and step, at the live placement."""


class DriftStatus(Model):
    """The cost of the live placement over that of the plan that would be made now."""

    ratio: FiniteOrNone = None
    """Exposed seconds of a step, live / plan: above 1 another placement is better; null before the first
    evaluation."""
    threshold: FiniteOrNone = None
    """Above it a new plan is made, if it saves ``planner.min_saving``; null if drift makes none."""
    plan_exposed_seconds: FiniteOrNone = None
    """Per step, with the plan."""
    exposed_seconds: FiniteOrNone = None
    """Per step, at the live placement."""
    plan_inter_node_bytes: FiniteOrNone = None
    """Per rank and step, with the plan."""
    inter_node_bytes: FiniteOrNone = None
    """Per rank and step, at the live placement."""
    plan_total_bytes: FiniteOrNone = None
    """Over all links, with the plan."""
    total_bytes: FiniteOrNone = None
    """Over all links, at the live placement."""
    age_seconds: FiniteOrNone = None
    """Since the newest evaluation."""
    evaluations: int = 0
    """Evaluations since the daemon started."""
    evaluation_seconds: float = 0.0
    """Wall time of all evaluations."""
    tables: tuple[TableDriftStatus, ...] = ()
    """One entry a table, in the configured order."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of drift."""
        yield gauge(
            "flexd_drift_ratio",
            "Exposed communication of a step at the live placement / with the plan that would be made now; NaN before "
            "the first evaluation.",
            _ratio(self.ratio, self.exposed_seconds),
        )
        yield gauges(
            "flexd_drift_exposed_seconds",
            "Exposed communication of a step at the live placement, and with the plan that would be made now.",
            "placement", {"plan": self.plan_exposed_seconds, "live": self.exposed_seconds},
        )  # fmt: skip
        yield gauges(
            "flexd_table_drift_ratio",
            "Exposed communication of each table's bytes at the live placement / with the plan that would be made now.",
            "table",
            {table.table: _ratio(table.ratio, table.exposed_seconds) for table in self.tables},
        )
        yield gauges(
            "flexd_table_exposed_seconds",
            "Exposed communication of each table's bytes a step at the live placement, now, without latencies.",
            "table",
            {table.table: table.exposed_seconds for table in self.tables},
        )
        yield summary(
            "flexd_drift_evaluation_duration_seconds", "Wall time of evaluating drift.", self.evaluations,
            self.evaluation_seconds,
        )  # fmt: skip


def drift_status(monitor: DriftMonitor, threshold: float | None) -> DriftStatus:
    """Return the newest evaluation of drift."""
    drift, compared = monitor.newest, dict[str, Any]()
    if drift is not None:
        plan, live = drift.plan.total, drift.live.total
        compared = {
            "ratio": drift.ratio,
            "plan_exposed_seconds": plan.exposed_seconds,
            "exposed_seconds": live.exposed_seconds,
            "plan_inter_node_bytes": plan.inter_node_bytes,
            "inter_node_bytes": live.inter_node_bytes,
            "plan_total_bytes": plan.total_bytes,
            "total_bytes": live.total_bytes,
            "tables": tuple(
                TableDriftStatus.from_object(traffic, table=name, ratio=drift.table_ratios[name])
                for name, traffic in drift.live.tables.items()
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
