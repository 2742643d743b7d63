"""Whole tables on ranks, greedily: in descending cost, each to the rank with the least cost so far that has the memory.

The costs are those of AutoShard's heuristic baselines (Zha et al., KDD 2022, arXiv 2208.06399, "Baselines" of the
experiments, and the released ``autoshard`` sharders).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


def place_greedily(cost: Float64Array, size: Float64Array, ranks: int, memory: float) -> Int64Array | None:
    """int64[p] rank of each shard: descending cost, to the least loaded rank with room; None if a shard finds none."""
    load, used = np.zeros(ranks), np.zeros(ranks)
    rank = np.empty(len(cost), np.int64)
    for shard in np.lexsort((np.arange(len(cost)), -size, -cost)):
        room = used + size[shard] <= memory
        if not room.any():
            return None
        best = int(np.lexsort((used, np.where(room, load, np.inf)))[0])
        rank[shard] = best
        load[best] += cost[shard]
        used[best] += size[shard]
    return rank
