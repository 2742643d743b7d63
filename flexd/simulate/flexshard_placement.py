"""FlexShard's placement for the replay, from its own view of the traffic: every access travels by itself.

"FlexShard: Flexible Sharding for Industry-Scale Sequence Recommendation Models" (arXiv 2301.02959) chooses per row, by
its access probability, between one copy, a copy in every node and a copy on every rank, under a cap on memory. Without
dedup a row's exchange grows with its accesses a (per rank and step), while the all-reduce of a replica does not:

    one copy        a (8 + 2 b) to a rank of the job
    every node      a (8 + 2 b) inside the node, and an all-reduce of b bytes between nodes
    every rank      an all-reduce of b bytes over all ranks

So what a copy saves grows with a, the best cap-bound choice is two cuts in the order of a, and all pairs of cuts are
tried at once. (``flexd/planner/baselines/flexshard.py`` prices the same peer by its expectation; here its rows are
needed.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.planner.model.row_bytes import ID_BYTES
from flexd.planner.model.workload import make_loads
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster, Collective, Link

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]


def flexshard_placement(
    profile: Profile, keyspace: KeySpace, layout: RankLayout, cluster: Cluster, replica_slots: Sequence[int]
) -> Placement:
    """The tiers of all listed rows within ``replica_slots`` of every rank, one number a dim-group.

    Raises:
        PlanError: the profile is empty or of other tables.
    """
    keys, tiers = [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
    for load, slots in zip(make_loads(profile, keyspace, layout), replica_slots, strict=True):
        order = np.lexsort((load.keys, -load.accesses))
        ranked = load.keys[order]
        saved = _saved_seconds(load.accesses[order], load.row_bytes, layout, cluster)
        device, replicated = _best_thresholds(saved, layout, int(slots))
        chosen = np.zeros(len(ranked), np.uint8)
        chosen[:replicated] = Tier.NODE
        chosen[:device] = Tier.DEVICE
        keys.append(ranked)
        tiers.append(_fitted(ranked, chosen, layout, int(slots)))
    return Placement.of(np.concatenate(keys), np.concatenate(tiers))


def _saved_seconds(accesses: Float64Array, row_bytes: int, layout: RankLayout, cluster: Cluster) -> Float64Array:
    """float64 [3, n]: time a rank and step that a row saves at each tier against one copy."""
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size

    def per_byte(link: Link, collective: Collective) -> float:
        curve = cluster.curve(link, collective)
        return curve.seconds_per_byte(curve.points[-1][0])

    near, far = (per_byte(link, Collective.ALL_TO_ALL) for link in (Link.INTRA_NODE, Link.INTER_NODE))
    rail = 2 * (nodes - 1) / (nodes * local) * per_byte(Link.INTER_NODE, Collective.ALL_REDUCE) * row_bytes
    inside = 2 * (local - 1) / local * per_byte(Link.INTRA_NODE, Collective.ALL_GATHER) * row_bytes
    exchanged = accesses * (ID_BYTES + 2 * row_bytes)
    # One all-to-all uses both links at the same time.
    home = exchanged * max((world - local) / world * far, (local - 1) / world * near)
    saved = np.zeros((len(Tier), len(accesses)))
    saved[Tier.NODE] = home - exchanged * (local - 1) / local * near - rail
    saved[Tier.DEVICE] = home - rail - inside
    if nodes == 1:
        saved[Tier.NODE] = 0.0
    return saved


def _best_thresholds(saved: Float64Array, layout: RankLayout, slots: int) -> tuple[int, int]:
    """(rows on every rank, rows on every rank or in every node), both from the hottest on."""
    rows, world = saved.shape[1], layout.world_size
    if world == 1 or rows == 0:
        return 0, 0
    budget = slots * world
    sums = np.concatenate([np.zeros((len(Tier), 1)), np.cumsum(saved, axis=1)], axis=1)
    device = np.arange(min(rows, budget // (world - 1)) + 1)
    room = (budget - device * (world - 1)) // max(1, layout.nodes - 1) if layout.nodes > 1 else np.zeros_like(device)
    worth = int(np.count_nonzero(saved[Tier.NODE] > 0))
    ends = np.clip(np.minimum(device + room, worth), device, rows)
    total = sums[Tier.DEVICE, device] + sums[Tier.NODE, ends] - sums[Tier.NODE, device]
    best = int(total.argmax())
    return best, int(ends[best])


def _fitted(keys: Int64Array, tiers: UInt8Array, layout: RankLayout, slots: int) -> UInt8Array:
    """As many of the hottest rows as fit every rank: homes are spread evenly, but not exactly so."""
    low, high = 0, int(np.count_nonzero(tiers))
    while low < high:
        middle = (low + high + 1) // 2
        fits = int(layout.replica_slots_used(keys[:middle], tiers[:middle]).max(initial=0)) <= slots
        low, high = (middle, high) if fits else (low, middle - 1)
    kept = tiers.copy()
    kept[low:] = Tier.HOME
    return kept
