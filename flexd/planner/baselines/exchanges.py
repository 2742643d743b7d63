"""Baselines without replicas, which differ in how rows travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexd.layout import RankLayout
from flexd.planner.cost import CostBreakdown, Exchange, group_cost, total_cost
from flexd.planner.workload import GroupLoad
from flexd.topology.model import Cluster


@dataclass(frozen=True)
class ExchangeBaseline:
    """All rows at HOME under one exchange."""

    name: str
    source: str
    exchange: Exchange

    def price(self, loads: Sequence[GroupLoad], layout: RankLayout, cluster: Cluster) -> CostBreakdown:
        return total_cost(
            group_cost(load, np.zeros(len(load.keys), np.uint8), layout, cluster, self.exchange) for load in loads
        )


ROW_WISE = ExchangeBaseline(
    "row_wise",
    "un-pooled row-wise sharding without dedup: TorchRec's default, FlexShard's (2301.02959) baseline",
    Exchange.DIRECT,
)
ROW_WISE_DEDUP = ExchangeBaseline(
    "row_wise_dedup",
    "row-wise sharding, each rank asks for a row once a step (TorchRec: use_index_dedup)",
    Exchange.DIRECT_DEDUP,
)
TWO_HOP = ExchangeBaseline("two_hop", "flexd's own chain with every row at HOME", Exchange.CHAIN)
