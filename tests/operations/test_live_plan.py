"""The planner's input: the configuration, and what the trainer says of itself."""

from __future__ import annotations

import numpy as np

from flexd.config.planner import PlannerConfig
from flexd.control.protocol.report import TrainerSettings, with_pooling
from flexd.core.keyspace import TableSpec
from flexd.core.layout import Tier
from flexd.operations.live_plan import TrainingJob, plan_limits
from flexd.planner.model.row_bytes import Exchange

TABLES = [TableSpec(name, 10, 4) for name in "abc"]
TOLD = with_pooling(TrainerSettings("direct", "float16"), TABLES, {"a": "owner", "c": "requester"})


def test_every_setting_is_passed_on() -> None:
    settings = PlannerConfig.model_validate(
        {
            "exclude_tables": ["b"],
            "pins": [{"table": "c", "tier": "NODE"}, {"table": "d", "tier": "DEVICE", "rows": [3, 1]}],
        }
    )
    job = TrainingJob.of(TOLD, TABLES, 4)
    limits, shape = plan_limits(settings, job), job.shape
    assert (shape.micro_batches, shape.comm_dtype) == (4, "float16")
    assert job.exchange is Exchange.DIRECT_DEDUP
    assert job.pooling_at == {"a": "owner", "c": "requester"}
    assert limits.exclude_tables == {"a", "b"}, "no row of a table that is pooled at the owner is copied"
    whole, rows = limits.pins
    assert (whole.table, whole.tier, whole.rows) == ("c", Tier.NODE, None)
    assert (rows.table, rows.tier) == ("d", Tier.DEVICE)
    assert rows.rows is not None
    np.testing.assert_array_equal(rows.rows, [3, 1])


def test_a_trainer_that_says_nothing_or_what_is_not_known_has_the_defaults() -> None:
    assert TrainingJob.of(None, TABLES) == TrainingJob()
    assert TrainingJob.of(TrainerSettings("auto", "float8"), TABLES) == TrainingJob()
