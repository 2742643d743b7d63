"""Row-wise sharding without replicas: strategies that differ in how rows travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexd.planner.model.cost import CostBreakdown, LoadSums, joint_cost
from flexd.planner.model.row_bytes import Exchange
from flexd.topology.cluster import Cluster


@dataclass(frozen=True)
class ExchangeBaseline:
    """All rows at HOME under one exchange. Homes are cyclic (``key % W``): hot rows spread better than in blocks."""

    name: str
    source: str
    exchange: Exchange

    def price(self, sums: Sequence[LoadSums], cluster: Cluster) -> CostBreakdown:
        return joint_cost(sums, [np.zeros(len(group.load.keys), np.uint8) for group in sums], cluster, self.exchange)


ROW_WISE = ExchangeBaseline(
    "row_wise",
    "un-pooled row-wise sharding without dedup: TorchRec's default, FlexShard's (arXiv 2301.02959) baseline",
    Exchange.DIRECT,
)
ROW_WISE_DEDUP = ExchangeBaseline(
    "row_wise_dedup",
    "row-wise sharding, each rank requests a row once a step (TorchRec: use_index_dedup)",
    Exchange.DIRECT_DEDUP,
)
TWO_HOP = ExchangeBaseline("two_hop", "flexd's own chain with every row at HOME", Exchange.CHAIN)

PLAN_BASELINES: tuple[ExchangeBaseline, ...] = (ROW_WISE, ROW_WISE_DEDUP, TWO_HOP)
"""Every baseline a plan shows, in the order they are shown."""
