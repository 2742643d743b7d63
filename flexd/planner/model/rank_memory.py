"""Memory of each rank: stored rows and the buffers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.homes import homes_of
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.planner.model.balance import RankBytes
from flexd.planner.model.row_bytes import Exchange, Phase, TrafficLink
from flexd.planner.model.workload import BACK_PER_RANK, BACK_RETURNED, PER_RANK, RETURNED, GroupLoad

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

DIRECTORY_BYTES_PER_SLOT = 10
"""A row for which a rank's directory has room: its key 4 (8 beyond 2^31 rows) and its number 4, four fifths full."""
DIRECTORY_BYTES_PER_ROW = 8
"""A listed row: its slot and tier 4, and as much for numbers that are free, at most."""


class Buffer(IntEnum):
    """Buffers of a rank during one pass (a micro-batch), beside stored rows."""

    ROWS = 0
    """The rows it looked up, each once if the exchange merges them."""
    GRADIENTS = 1
    """Gradients of the rows that it looked up."""
    EXCHANGE = 2
    """Ids sent and received, which the backward pass needs again, and rows or gradients sent and received."""
    SYNC = 3
    """Gradients of the touched replicated rows that it holds."""


def step_buffers(
    ranks: RankBytes, loads: Sequence[GroupLoad], totals: Sequence[Float64Array], exchange: Exchange, layout: RankLayout
) -> Float64Array:
    """Return float64[buffer, world]: expected bytes, as if all buffers were held at the same time.

    Args:
        ranks: bytes of an optimizer step.
        totals: of each load float64[statistic] over all its rows.
    """
    forward_passes = loads[0].micro_batches
    back_passes = 1 if loads[0].merged_backward else forward_passes
    direct = exchange is Exchange.DIRECT
    buffers = np.zeros((len(Buffer), layout.world_size))
    for load, total in zip(loads, totals, strict=True):
        buffers[Buffer.ROWS] += load.wire_bytes * total[RETURNED if direct else PER_RANK] / forward_passes
        buffers[Buffer.GRADIENTS] += load.wire_bytes * total[BACK_RETURNED if direct else BACK_PER_RANK] / back_passes
    both = (ranks.sent + ranks.received)[:, :, TrafficLink.INTRA_NODE :].sum(axis=(0, 2))
    rows = np.maximum(both[Phase.FORWARD_ROWS] / forward_passes, both[Phase.BACKWARD_ROWS] / back_passes)
    buffers[Buffer.EXCHANGE] = both[Phase.FORWARD_IDS] / forward_passes + rows
    buffers[Buffer.SYNC] = _synchronised(ranks, exchange, layout)
    return buffers


def _synchronised(ranks: RankBytes, exchange: Exchange, layout: RankLayout) -> Float64Array:
    """float64[world]: the summed gradients of replicated rows on each holder."""
    sent, received = ranks.sent[:, Phase.SYNC_SUMS], ranks.received[:, Phase.SYNC_SUMS]
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size

    def received_sums(tier: Tier, link: TrafficLink, peers: int) -> Float64Array:
        """Return the bytes of all sums: a holder receives those of other homes and sends its own to each peer."""
        rows: Float64Array = received[tier, link] + sent[tier, link] / max(peers - 1, 1)
        return rows

    reduced = _all_reduced(ranks.sent[:, Phase.SYNC_ROWS], layout)
    if exchange is Exchange.DIRECT:
        return reduced
    if exchange is Exchange.DIRECT_DEDUP:
        links = [TrafficLink.INTRA_NODE, TrafficLink.INTER_NODE]
        everywhere: Float64Array = (received[Tier.DEVICE, links] + sent[Tier.DEVICE, links] / (world - 1)).sum(axis=0)
        return reduced + everywhere
    if nodes == 1:
        return received_sums(Tier.DEVICE, TrafficLink.INTRA_NODE, local)
    return (
        reduced
        + received_sums(Tier.NODE, TrafficLink.INTER_NODE, nodes)
        + _of_node(received_sums(Tier.DEVICE, TrafficLink.INTER_NODE, nodes), layout)
    )


def _all_reduced(sent: Float64Array, layout: RankLayout) -> Float64Array:
    """float64[world]: the union's gradients on each holder, from float64[tier, link, world] bytes of its all-reduce.

    An all-reduce of s bytes over g ranks sends 2 (g-1)/g s a rank; that of DEVICE rows is done by rail.
    """
    nodes, local = layout.nodes, layout.local_ranks
    if nodes > 1:
        between = sent[Tier.NODE, TrafficLink.INTER_NODE] + _of_node(sent[Tier.DEVICE, TrafficLink.INTER_NODE], layout)
        union: Float64Array = between * nodes / (2 * (nodes - 1))
        return union
    if local > 1:
        inside: Float64Array = sent[Tier.DEVICE, TrafficLink.INTRA_NODE] * local / (2 * (local - 1))
        return inside
    return np.zeros(layout.world_size)


def _of_node(of_ranks: Float64Array, layout: RankLayout) -> Float64Array:
    """float64[world] -> float64[world]: summed over the ranks of each one's node."""
    by_node = of_ranks.reshape(layout.nodes, layout.local_ranks).sum(axis=1)
    return np.repeat(by_node, layout.local_ranks)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of each rank.

    Attributes:
        home: float64[world], home rows with their optimizer state.
        replicas: float64[world], replica slots with theirs, used or not: they are allocated when training starts.
        directory: float64[world], of replicated rows.
        buffers: float64[buffer, world], of a step.
    """

    home: Float64Array
    replicas: Float64Array
    directory: Float64Array
    buffers: Float64Array

    @property
    def stored(self) -> Float64Array:
        """float64[world]: what stays between steps."""
        return self.home + self.replicas + self.directory

    @property
    def total(self) -> Float64Array:
        """float64[world]."""
        total: Float64Array = self.stored + self.buffers.sum(axis=0)
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return the memory of the fullest rank, JSON-able."""
        at = int(self.total.argmax())
        return {
            "total_bytes": float(self.total[at]),
            "home_bytes": float(self.home[at]),
            "replica_bytes": float(self.replicas[at]),
            "directory_bytes": float(self.directory[at]),
            "buffer_bytes": {buffer.name.lower(): float(self.buffers[buffer, at]) for buffer in Buffer},
        }


def placement_memory(
    keyspace: KeySpace,
    layout: RankLayout,
    slots: Sequence[Int64Array],
    placement: Placement,
    buffers: Float64Array,
) -> RankMemory:
    """Return the memory of the ranks with these rows above HOME.

    Args:
        slots: of each dim-group int64[world], replica slots of the ranks.
        buffers: ``step_buffers`` of that placement.
    """
    world = layout.world_size
    home, replicas = np.zeros(world), np.zeros(world)
    homes = homes_of(keyspace, layout)
    for number, (group, of_ranks) in enumerate(zip(keyspace.groups, slots, strict=True)):
        spec = keyspace.tables[group.tables[0]]
        row_bytes = spec.row_bytes + spec.state_bytes
        home += homes.home_rows(number) * row_bytes
        # Copies by the rule "every rank" have slots beside those of plans.
        replicas += (of_ranks + homes.copied_slots(number)) * row_bytes
    # A directory has home copies too: all DEVICE rows, and the NODE rows of the rank's rail.
    device = int(np.count_nonzero(placement.tiers == Tier.DEVICE))
    rail = np.bincount(homes.rail(placement.keys[placement.tiers == Tier.NODE]), minlength=layout.local_ranks)
    directory = DIRECTORY_BYTES_PER_ROW * (device + np.tile(rail, layout.nodes)).astype(np.float64)
    holders = layout.nodes if layout.nodes > 1 else layout.local_ranks
    for group, of_ranks in zip(keyspace.groups, slots, strict=True):
        if holders > 1:  # a row uses a slot on all but one of its holders
            room = np.minimum(group.rows, of_ranks * holders // (holders - 1))
            directory += DIRECTORY_BYTES_PER_SLOT * room
    return RankMemory(home, replicas, directory, buffers)
