"""FlexShard as published: rows in tiers by their probability, under a memory cap, no dedup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.layout import Tier
from flexd.planner.baselines.problem import BaselineResult, PlanningProblem, over_memory
from flexd.planner.model.balance import rank_bytes, sums_by_home
from flexd.planner.model.cost import CostBreakdown, LoadSums, cost_of_ranks
from flexd.planner.model.row_bytes import Exchange, direct_byte_factors

Float64Array = npt.NDArray[np.float64]

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Of the replica memory: how much is used at all, and how much of that by DEVICE rows."""


@dataclass(frozen=True)
class _Rows:
    """A dim-group's rows by falling probability: listed rows one by one, then bins of equal frequency.

    Attributes:
        order: int64[h], listed rows by falling accesses.
        bins: int64[k], bins by falling accesses.
    """

    sums: LoadSums
    order: npt.NDArray[np.int64]
    bins: npt.NDArray[np.int64]

    @staticmethod
    def of(sums: LoadSums) -> _Rows:
        load = sums.load
        return _Rows(sums, np.argsort(-load.accesses, kind="stable"), np.argsort(-load.bin_accesses, kind="stable"))

    def by_home(self, device_rows: float, node_rows: float) -> Float64Array:
        """float64[tier, statistic, world]: the hottest rows at DEVICE, the next at NODE."""
        load, layout = self.sums.load, self.sums.layout
        listed = len(load.keys)
        place = np.arange(listed)
        tiers = np.zeros(listed, np.uint8)
        tiers[self.order] = np.where(
            place < round(device_rows),
            Tier.DEVICE,
            np.where(place < round(device_rows + node_rows), Tier.NODE, Tier.HOME),
        )
        before = listed + np.concatenate([[0.0], np.cumsum(load.bin_rows[self.bins])])
        ends = np.clip(np.array([0.0, device_rows, device_rows + node_rows, before[-1]]), listed, before[-1])
        each = load.bin_statistics(layout)[:, self.bins]
        even = np.zeros((len(Tier), len(each)))
        for tier, start, end in ((Tier.DEVICE, 0, 1), (Tier.NODE, 1, 2), (Tier.HOME, 2, 3)):
            taken = np.clip(ends[end], before[:-1], before[1:]) - np.clip(ends[start], before[:-1], before[1:])
            even[tier] = each @ np.maximum(taken, 0.0)
        return sums_by_home(self.sums.listed, tiers, self.sums.home_rank, even, layout, range(len(each)))


@dataclass(frozen=True)
class FlexShard:
    """Sethi et al., arXiv 2301.02959 ("precise replication of embedding rows based on their underlying probability
    distribution", a tier per level of the network, the memory of the state of the art as the cap).

    Most favourable to it: it knows every row's frequency, bins included; its thresholds are the best of a grid by this
    cost model; a NODE row is fetched inside the node, a DEVICE row not at all; gradients of replicas are synchronised
    as flexd does it. What it does not have is dedup: every look-up of a row that is not on the rank travels.
    """

    name: str = "flexshard"
    source: str = "arXiv 2301.02959: rows in tiers by probability, no dedup"

    def evaluate(self, case: PlanningProblem) -> BaselineResult:
        layout = case.layout
        row_bytes = np.array([group.load.row_bytes + group.load.state_bytes for group in case.sums], dtype=np.float64)
        memory = case.home_memory()
        most = memory + float(row_bytes @ np.array(case.replica_slots, dtype=np.float64))
        if reason := over_memory(most, case):
            return BaselineResult(self.name, self.source, reason)
        rows = [_Rows.of(group) for group in case.sums]
        best: tuple[float, CostBreakdown, Float64Array, float, float] | None = None
        for device_share, node_share in self._splits(layout.nodes > 1, layout.local_ranks > 1):
            copies = np.zeros(layout.world_size)
            device_total = node_total = 0.0
            by_home, parts = [], []
            for group, slots, size in zip(rows, case.replica_slots, row_bytes, strict=True):
                every = len(group.sums.load.keys) + float(group.sums.load.bin_rows.sum())
                device = min(device_share * slots * layout.world_size / max(layout.world_size - 1, 1), every)
                node = min(node_share * slots * layout.world_size / max(layout.nodes - 1, 1), every - device)
                by_home.append(group.by_home(device, node))
                table = direct_byte_factors(layout, group.sums.load.wire_bytes, dedup=False)
                parts.append(rank_bytes(by_home[-1], table, layout, Exchange.DIRECT))
                copies += size * (
                    device * (layout.world_size - 1) / layout.world_size + node * (layout.nodes - 1) / layout.world_size
                )
                device_total, node_total = device_total + device, node_total + node
            ranks = parts[0]
            for part in parts[1:]:
                ranks = ranks + part
            by_tier = np.sum([home.sum(axis=2) for home in by_home], axis=0)
            cost = cost_of_ranks(ranks, case.sums, case.cluster, Exchange.DIRECT, by_tier)
            if best is None or cost.peak_exposed_seconds < best[0]:
                best = (cost.peak_exposed_seconds, cost, memory + copies, device_total, node_total)
        if best is None:
            return BaselineResult(self.name, self.source, "no split of the memory was tried")
        figures = {"device_rows": best[3], "node_rows": best[4], "memory_cap_bytes": float(most.max())}
        return BaselineResult(self.name, self.source, "", best[1], best[2], figures)

    @staticmethod
    def _splits(nodes: bool, ranks: bool) -> Iterator[tuple[float, float]]:
        """(share of the slots for DEVICE rows, for NODE rows)."""
        for used in _SHARES:
            for device in _SHARES if nodes and ranks else (1.0 if ranks else 0.0,):
                if used > 0 or device == _SHARES[0] or not (nodes and ranks):
                    yield used * device, used * (1 - device)


FLEXSHARD = FlexShard()
