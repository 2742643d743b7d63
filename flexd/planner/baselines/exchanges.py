"""Row-wise sharding without replicas: strategies that differ in how rows travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexd.planner.baselines.problem import BaselineResult, PlanningProblem, over_memory
from flexd.planner.model.cost import CostBreakdown, LoadSums, joint_cost
from flexd.planner.model.row_bytes import Exchange, Phase
from flexd.topology.cluster import Cluster


@dataclass(frozen=True)
class ExchangeBaseline:
    """All rows at HOME under one exchange. Homes are cyclic (``key % W``): hot rows spread better than in blocks."""

    name: str
    source: str
    exchange: Exchange
    hidden_ids: bool = False
    """Requests of the next batch travel during this one, at no cost."""

    def price(self, sums: Sequence[LoadSums], cluster: Cluster) -> CostBreakdown:
        cost = joint_cost(sums, [np.zeros(len(group.load.keys), np.uint8) for group in sums], cluster, self.exchange)
        if not self.hidden_ids:
            return cost
        return replace(cost, exposed_share=np.where(np.arange(len(Phase)) == Phase.FORWARD_IDS, 0, cost.exposed_share))

    def evaluate(self, case: PlanningProblem) -> BaselineResult:
        memory = case.home_memory()
        if reason := over_memory(memory, case):
            return BaselineResult(self.name, self.source, reason)
        return BaselineResult(self.name, self.source, "", self.price(case.sums, case.cluster), memory)


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
ROW_WISE_DEDUP_PIPELINED = ExchangeBaseline(
    "row_wise_dedup_pipelined",
    "TorchRec: use_index_dedup, and the next batch's input exchange during this step (TrainPipelineSparseDist)",
    Exchange.DIRECT_DEDUP,
    hidden_ids=True,
)
TWO_HOP = ExchangeBaseline("two_hop", "flexd's own chain with every row at HOME", Exchange.CHAIN)
