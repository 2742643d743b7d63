"""Table-row-wise: each table belongs to one node, its rows are spread over that node's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from flexd.core.layout import Tier
from flexd.planner.baselines.problem import BaselineResult, PlanningProblem
from flexd.planner.baselines.whole_tables import make_shards, place_greedily, returned_rows
from flexd.planner.model.balance import rank_bytes, sums_by_home
from flexd.planner.model.cost import cost_of_ranks
from flexd.planner.model.row_bytes import Exchange, direct_byte_factors
from flexd.planner.model.workload import ACCESSES, BACK_RETURNED, RETURNED


@dataclass(frozen=True)
class TableRowWise:
    """Nodes are filled greedily by look-ups x dim."""

    name: str = "table_row_wise"
    source: str = "TorchRec table-row-wise (ShardingType.TABLE_ROW_WISE), greedy by look-ups x dim"

    def evaluate(self, case: PlanningProblem) -> BaselineResult:
        layout = case.layout
        shards = make_shards(case)
        node = place_greedily(
            shards.dim * shards.accesses, shards.bytes, layout.nodes, case.memory_bytes * layout.local_ranks
        )
        if node is None:
            reason = f"a table of {float(shards.bytes.max()) / 1e9:.1f} GB finds no node with room for it"
            return BaselineResult(self.name, self.source, reason)
        parts = []
        for table, group in enumerate(case.table_sums):
            ranks = np.array(layout.node_ranks(int(node[table])))
            home = ranks[group.load.keys % layout.local_ranks]
            nothing = np.zeros((len(Tier), len(group.listed)))
            tiers = np.zeros(len(group.load.keys), np.uint8)
            wanted = (ACCESSES, RETURNED, BACK_RETURNED)
            by_home = sums_by_home(group.listed, tiers, home, nothing, layout, wanted)
            by_home[Tier.HOME][:, ranks] += (group.even(np.zeros(len(Tier)))[Tier.HOME] / layout.local_ranks)[:, None]
            total = by_home[Tier.HOME].sum(axis=1)
            if total[RETURNED] > 0:
                # The loads count sums of a bag at W homes; here it has L.
                back = returned_rows(case, table, float(total[ACCESSES]), layout.local_ranks) / total[RETURNED]
                by_home[Tier.HOME, [RETURNED, BACK_RETURNED]] *= back
            wire = case.shape.wire_row_bytes(case.keyspace.tables[table])
            parts.append(rank_bytes(by_home, direct_byte_factors(layout, wire, dedup=False), layout, Exchange.DIRECT))
        memory = np.repeat(
            np.bincount(node, weights=shards.bytes, minlength=layout.nodes) / layout.local_ranks, layout.local_ranks
        )
        cost = cost_of_ranks(reduce(add, parts), case.sums, case.cluster, Exchange.DIRECT)
        return BaselineResult(self.name, self.source, "", cost, memory)


TABLE_ROW_WISE = TableRowWise()
