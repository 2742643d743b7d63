"""Translation of the planner section of the configuration into settings of the planner."""

from __future__ import annotations

import numpy as np

from flexd.config.planner import PlannerConfig
from flexd.core.layout import Tier
from flexd.operations.plan_settings import plan_limits, running_exchange, training_shape
from flexd.planner.model.row_bytes import Exchange
from flexd.planner.model.training_shape import TrainingShape


def test_defaults_change_nothing() -> None:
    settings = PlannerConfig()
    limits = plan_limits(settings)
    assert (limits.pins, limits.exclude_tables, dict(limits.table_slots)) == ((), frozenset(), {})
    assert training_shape(settings) == TrainingShape(merged_backward=True), (
        "the collection pushes gradients once a step"
    )
    assert running_exchange(settings) is Exchange.CHAIN


def test_every_setting_is_passed_on() -> None:
    settings = PlannerConfig.model_validate(
        {
            "exchange": "direct",
            "micro_batches": 4,
            "frozen_tables": ["a"],
            "exclude_tables": ["b"],
            "pooled_tables": {"e": "sums", "f": "rows"},
            "pins": [{"table": "c", "tier": "NODE"}, {"table": "d", "tier": "DEVICE", "rows": [3, 1]}],
            "table_budgets": {"c": 7},
        }
    )
    limits, shape = plan_limits(settings), training_shape(settings)
    assert running_exchange(settings) is Exchange.DIRECT_DEDUP
    assert running_exchange(PlannerConfig(exchange="direct_no_dedup")) is Exchange.DIRECT
    assert (shape.micro_batches, shape.frozen_tables) == (4, frozenset({"a"}))
    assert limits.exclude_tables == {"b", "e"}, "no row of a table that answers by sums is copied"
    assert limits.table_slots == {"c": 7}
    whole, rows = limits.pins
    assert (whole.table, whole.tier, whole.rows) == ("c", Tier.NODE, None)
    assert (rows.table, rows.tier) == ("d", Tier.DEVICE)
    assert rows.rows is not None
    np.testing.assert_array_equal(rows.rows, [3, 1])
