"""Each gate closes by its own configuration key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexd.config.planner import PlannerConfig
from flexd.core.errors import PlanError
from flexd.operations.proposals import evaluate_gates, require_open
from flexd.sketch.profile import Profile, TableProfile


def profile(**changes: Any) -> Profile:
    share = np.array([0.54, 0.36])
    table = TableProfile(
        "item", 10, 100.0, 10.0, np.array([1, 2]), share, np.empty(0), np.empty(0), 2.0, (share - 0.1, share + 0.1)
    )
    return replace(Profile((table,), lag_messages=5, samples=1000), **changes)


OPEN = {
    "min_samples": 1000, "min_coverage": 0.9, "max_lag_messages": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("closed", "bound", "said"),
    [
        ("samples", {"min_samples": 1001}, "1000 accesses seen"), ("coverage", {"min_coverage": 0.91}, "explains 90%"),
        ("lag", {"max_lag_messages": 4}, "5 messages"),
    ],
)  # fmt: skip
def test_each_gate_closes_by_its_own_key(closed: str, bound: dict[str, float], said: str) -> None:
    require_open(evaluate_gates(profile(), PlannerConfig(**OPEN)))
    checked = evaluate_gates(profile(), PlannerConfig(**{**OPEN, **bound}))
    assert [gate.name for gate in checked if not gate.open] == [closed]
    with pytest.raises(PlanError, match=said) as error:
        require_open(checked)
    key = next(gate.key for gate in checked if not gate.open)
    assert key == f"planner.{next(iter(bound))}"
    assert key in error.value.message
    assert key in error.value.remedy


def test_tables_count_by_their_accesses_in_coverage() -> None:
    (table,) = profile().tables
    exact = replace(table, table="exact", weight=900.0, hot_share=np.array([0.3, 0.2]), hot_bounds=None)
    both = profile(tables=(table, exact))
    measured = {gate.name: gate.measured for gate in evaluate_gates(both, PlannerConfig(**OPEN))}
    assert measured["coverage"] == pytest.approx(0.54)
