"""All strategies that flexd is compared with."""

from __future__ import annotations

from flexd.planner.baselines.exchanges import ROW_WISE, ROW_WISE_DEDUP, TWO_HOP
from flexd.planner.baselines.flexshard import FLEXSHARD, FLEXSHARD_SLOTS
from flexd.planner.baselines.protocol import Baseline
from flexd.planner.baselines.recshard import RECSHARD
from flexd.planner.baselines.table_row_wise import TABLE_ROW_WISE
from flexd.planner.baselines.whole_tables import (
    COLUMN_WISE,
    TABLE_WISE_DIM,
    TABLE_WISE_LOOKUP,
    TABLE_WISE_SIZE,
    TABLE_WISE_SIZE_LOOKUP,
)

ALL_BASELINES: tuple[Baseline, ...] = (
    ROW_WISE,
    ROW_WISE_DEDUP,
    TWO_HOP,
    TABLE_WISE_SIZE,
    TABLE_WISE_DIM,
    TABLE_WISE_LOOKUP,
    TABLE_WISE_SIZE_LOOKUP,
    COLUMN_WISE,
    TABLE_ROW_WISE,
    FLEXSHARD,
    FLEXSHARD_SLOTS,
    RECSHARD,
)
"""In the order they are shown."""
