"""All strategies that flexd is compared with."""

from __future__ import annotations

from flexd.planner.baselines.exchanges import ROW_WISE, ROW_WISE_DEDUP, ROW_WISE_DEDUP_PIPELINED, TWO_HOP
from flexd.planner.baselines.flexshard import FLEXSHARD, FLEXSHARD_SLOTS
from flexd.planner.baselines.protocol import Baseline
from flexd.planner.baselines.recshard import RECSHARD
from flexd.planner.baselines.table_row_wise import TABLE_ROW_WISE
from flexd.planner.baselines.whole_tables import (
    COLUMN_WISE,
    TABLE_WISE_DIM,
    TABLE_WISE_LOOKUP,
    TABLE_WISE_LOOKUP_HOST,
    TABLE_WISE_SIZE,
    TABLE_WISE_SIZE_HOST,
    TABLE_WISE_SIZE_LOOKUP,
    TABLE_WISE_SIZE_LOOKUP_HOST,
)

ROW_BASELINES: tuple[Baseline, ...] = (
    ROW_WISE,
    ROW_WISE_DEDUP,
    ROW_WISE_DEDUP_PIPELINED,
    TWO_HOP,
    TABLE_ROW_WISE,
    FLEXSHARD,
    FLEXSHARD_SLOTS,
)
"""Those that divide every table by row, for few large tables of any kind."""
TABLE_BASELINES: tuple[Baseline, ...] = (
    TABLE_WISE_SIZE,
    TABLE_WISE_DIM,
    TABLE_WISE_LOOKUP,
    TABLE_WISE_SIZE_LOOKUP,
    COLUMN_WISE,
)
"""Those that place whole tables or columns, for many pooled tables that fit in fast memory."""
HOST_BASELINES: tuple[Baseline, ...] = (
    TABLE_WISE_SIZE_HOST,
    TABLE_WISE_LOOKUP_HOST,
    TABLE_WISE_SIZE_LOOKUP_HOST,
    RECSHARD,
)
"""Those that place whole tables over fast and host memory, for many pooled tables that do not fit in fast memory."""
ALL_BASELINES: tuple[Baseline, ...] = (*ROW_BASELINES, *TABLE_BASELINES, *HOST_BASELINES)
"""In the order they are shown."""
