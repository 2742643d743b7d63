"""Strategies that divide tables by row: exchanges of rows at HOME, and FlexShard as published."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flexd.core.layout import Tier
from flexd.planner.baselines import ROW_WISE, ROW_WISE_DEDUP, TWO_HOP, ExchangeBaseline
from flexd.planner.model.row_bytes import Phase
from flexd.simulate.flexshard_tiers import flexshard_tiers
from tools.bench.peers.problem import BaselineResult, PlanningProblem, over_memory


@dataclass(frozen=True)
class FlexShard:
    """Sethi et al., arXiv 2301.02959 ("precise replication of embedding rows based on their underlying probability
    distribution", a tier per level of the network, a cap on memory).

    Most favourable to it: it knows every row's frequency, bins included; its cuts are the best by this cost model; a
    NODE row is fetched inside the node, a DEVICE row not at all; touched copies are all-reduced. What it does not have
    is dedup: every look-up of a row that is not on the rank travels.

    Attributes:
        whole_memory: its cap is all memory of a rank; False: home rows and ``replica_slots``, as strategies have that
            copy rows.
    """

    name: str = "flexshard"
    source: str = "arXiv 2301.02959: rows in tiers by probability under the cap of a rank's memory, no dedup"
    whole_memory: bool = True

    def evaluate(self, case: PlanningProblem) -> BaselineResult:
        memory = case.home_memory()
        sizes = [group.load.row_bytes + group.load.state_bytes for group in case.sums]
        needed = memory if self.whole_memory else memory + float(np.dot(sizes, case.replica_slots))
        if reason := over_memory(needed, case):
            return BaselineResult(self.name, self.source, reason)
        cap = case.memory_bytes if self.whole_memory else float(needed.max())
        found = flexshard_tiers(case.sums, case.layout, case.cluster, cap - float(memory.max()))
        figures = {
            "device_rows": found.rows(Tier.DEVICE),
            "node_rows": found.rows(Tier.NODE),
            "memory_cap_bytes": cap,
        }
        return BaselineResult(self.name, self.source, "", found.cost, memory + found.replica_bytes, figures)


@dataclass(frozen=True)
class RowWise:
    """Every row at HOME under one exchange.

    Attributes:
        hidden_ids: requests of the next batch travel during this one, at no cost.
    """

    exchange: ExchangeBaseline
    hidden_ids: bool = False

    @property
    def name(self) -> str:
        return f"{self.exchange.name}{'_pipelined' if self.hidden_ids else ''}"

    @property
    def source(self) -> str:
        pipelined = ", and the next batch's input exchange during this step (TorchRec: TrainPipelineSparseDist)"
        return f"{self.exchange.source}{pipelined if self.hidden_ids else ''}"

    def evaluate(self, case: PlanningProblem) -> BaselineResult:
        memory = case.home_memory()
        if reason := over_memory(memory, case):
            return BaselineResult(self.name, self.source, reason)
        cost = self.exchange.price(case.sums, case.cluster)
        if self.hidden_ids:
            shown = np.where(np.arange(len(Phase)) == Phase.FORWARD_IDS, 0, cost.exposed_share)
            cost = replace(cost, exposed_share=shown)
        return BaselineResult(self.name, self.source, "", cost, memory)


FLEXSHARD = FlexShard()
FLEXSHARD_SLOTS = FlexShard(
    "flexshard_slots", "arXiv 2301.02959, as flexshard, with the memory of flexd's replica slots", whole_memory=False
)
ROW_PEERS = (
    RowWise(ROW_WISE), RowWise(ROW_WISE_DEDUP), RowWise(ROW_WISE_DEDUP, hidden_ids=True), RowWise(TWO_HOP), FLEXSHARD,
    FLEXSHARD_SLOTS,
)  # fmt: skip
"""Those that divide every table by row, for few large tables of any kind."""
