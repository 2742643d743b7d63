"""Drift: the live placement under the present accesses against those it was planned for."""

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
    """Exposed seconds of its bytes, now / at planning; null if it caused none then."""
    exposed_seconds: float = 0.0
    """Per step, now; without the collectives' latencies."""
    inter_node_bytes: float = 0.0
    """Per rank and step, now."""


class DriftStatus(Model):
    """The cost of the live placement now and when it was planned."""

    ratio: FiniteOrNone = None
    """Exposed seconds of a step, now / at planning: above 1 the placement has got worse; null before the first
    evaluation."""
    threshold: FiniteOrNone = None
    """Above it a new plan is made; null if drift makes none."""
    exposed_seconds_then: FiniteOrNone = None
    """Per step, under the profile of the plan."""
    exposed_seconds: FiniteOrNone = None
    """Per step, now."""
    inter_node_bytes_then: FiniteOrNone = None
    """Per rank and step, under the profile of the plan."""
    inter_node_bytes: FiniteOrNone = None
    """Per rank and step, now."""
    total_bytes_then: FiniteOrNone = None
    """Over all links, under the profile of the plan."""
    total_bytes: FiniteOrNone = None
    """Over all links, now."""
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
            "Exposed communication of a step at the live placement, now / when it was planned; NaN before the first "
            "evaluation.",
            _ratio(self.ratio, self.exposed_seconds),
        )
        for name, text, then, now in (
            ("exposed_seconds", "Exposed communication of a step.", self.exposed_seconds_then, self.exposed_seconds),
            (
                "inter_node_bytes",
                "Bytes between nodes, per rank and step.",
                self.inter_node_bytes_then,
                self.inter_node_bytes,
            ),
            ("total_bytes", "Bytes over all links, per rank and step.", self.total_bytes_then, self.total_bytes),
        ):
            yield gauges(
                f"flexd_drift_{name}", f"Live placement, under the profile of its plan and now. {text}", "profile",
                {"planned": then, "present": now},
            )  # fmt: skip
        yield gauges(
            "flexd_table_drift_ratio",
            "Exposed communication of each table's bytes at the live placement, now / when it was planned.",
            "table",
            {table.table: _ratio(table.ratio, table.exposed_seconds) for table in self.tables},
        )
        yield gauges(
            "flexd_table_exposed_seconds",
            "Exposed communication of each table's bytes a step at the live placement, now, without latencies.",
            "table",
            {table.table: table.exposed_seconds for table in self.tables},
        )
        yield gauges(
            "flexd_table_inter_node_bytes",
            "Bytes of each table between nodes, per rank and step, at the live placement, now.",
            "table",
            {table.table: table.inter_node_bytes for table in self.tables},
        )
        yield gauge("flexd_drift_age_seconds", "Since the newest evaluation of drift.", self.age_seconds)
        yield summary(
            "flexd_drift_evaluation_duration_seconds", "Wall time of evaluating drift.", self.evaluations,
            self.evaluation_seconds,
        )  # fmt: skip


def drift_status(monitor: DriftMonitor, threshold: float | None) -> DriftStatus:
    """Return the newest evaluation of drift."""
    drift, compared = monitor.newest, dict[str, Any]()
    if drift is not None:
        then, now = drift.then.total, drift.now.total
        compared = {
            "ratio": drift.ratio,
            "exposed_seconds_then": then.exposed_seconds,
            "exposed_seconds": now.exposed_seconds,
            "inter_node_bytes_then": then.inter_node_bytes,
            "inter_node_bytes": now.inter_node_bytes,
            "total_bytes_then": then.total_bytes,
            "total_bytes": now.total_bytes,
            "tables": tuple(
                TableDriftStatus.from_object(traffic, table=name, ratio=drift.table_ratios[name])
                for name, traffic in drift.now.tables.items()
            ),
        }
    return DriftStatus(
        threshold=threshold,
        age_seconds=monitor.age_seconds(),
        evaluations=monitor.evaluations,
        evaluation_seconds=monitor.seconds,
        **compared,
    )


def _ratio(ratio: float | None, now: float | None) -> float | None:
    """Restore the infinity, which the model cannot express, of a cost that was 0 when it was planned."""
    return math.inf if ratio is None and now else ratio
