"""FlexShard as published: rows in tiers by their probability, under a memory cap, no dedup."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexd.core.layout import Tier
from flexd.planner.baselines.flexshard_tiers import flexshard_tiers
from flexd.planner.baselines.problem import BaselineResult, PlanningProblem, over_memory


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


FLEXSHARD = FlexShard()
FLEXSHARD_SLOTS = FlexShard(
    "flexshard_slots", "arXiv 2301.02959, as flexshard, with the memory of flexd's replica slots", whole_memory=False
)
