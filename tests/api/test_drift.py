"""Drift on the metrics page."""

from __future__ import annotations

import math

from flexd.api.placement import DriftStatus, TableDriftStatus


def values(status: DriftStatus) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value for family in status.metrics() for sample in family.samples
    }


def test_a_cost_that_a_plan_would_end_is_infinitely_more() -> None:
    tables = (
        TableDriftStatus(table="new", ratio=math.inf, exposed_seconds=0.5), TableDriftStatus(table="old", ratio=1.5),
    )  # fmt: skip
    found = values(DriftStatus(ratio=math.inf, exposed_seconds=0.5, tables=tables))
    assert found["flexd_table_drift_ratio", "new"] == math.inf
    assert found["flexd_table_drift_ratio", "old"] == 1.5
    assert found[("flexd_drift_ratio",)] == math.inf


def test_nothing_is_known_before_the_first_evaluation() -> None:
    found = values(DriftStatus())
    assert math.isnan(found[("flexd_drift_ratio",)])
    assert math.isnan(found["flexd_drift_exposed_seconds", "live"])
