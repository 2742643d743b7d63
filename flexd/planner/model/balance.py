"""Bytes of each rank: a collective takes as long as its busiest rank.

Homes are cyclic by key, so a hot row loads its home (second hop, direct exchange) or its rail (first hop, NODE
synchronisation) more than the others. The mean over the ranks of the result is the mean that ``row_bytes`` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.row_bytes import EXCHANGE_PHASES, Exchange, Phase, TrafficLink

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]


def sums_by_home(
    listed: Float64Array,
    tiers: UInt8Array,
    home_rank: Int64Array,
    even: Float64Array,
    layout: RankLayout,
    wanted: Sequence[int],
) -> Float64Array:
    """Return float64[tier, statistic, world]: statistics summed over the rows of each tier and home.

    Args:
        listed: float64[statistics, h] of the listed rows.
        home_rank: int64[h] of the listed rows.
        even: float64[tier, statistic] of all other rows, which spread evenly over the homes.
        wanted: statistics to sum; the others are 0.
    """
    world = layout.world_size
    result = np.zeros((len(Tier), len(even[0]), world))
    place = tiers.astype(np.int64) * world + home_rank
    for statistic in wanted:
        summed = np.bincount(place, weights=listed[statistic], minlength=len(Tier) * world)
        result[:, statistic] = summed.reshape(len(Tier), world) + even[:, statistic, None] / world
    return result


@dataclass(frozen=True)
class RankBytes:
    """Bytes of every rank in one optimizer step.

    Attributes:
        sent, received: float64[tier, phase, link, world].
    """

    sent: Float64Array
    received: Float64Array

    def __add__(self, other: RankBytes) -> RankBytes:
        return RankBytes(self.sent + other.sent, self.received + other.received)

    def busiest(self) -> Float64Array:
        """Return float64[tier, phase, link]: bytes of the rank that sends or receives most in each phase, on each link.

        Each rank's wire works in both directions at once, so the direction with more bytes counts.
        """
        tiers, phases, links, _ = self.sent.shape
        both = np.concatenate([self.sent, self.received], axis=3)
        at = np.broadcast_to(both.sum(axis=0).argmax(axis=2), (tiers, phases, links))
        result: Float64Array = np.take_along_axis(both, at[..., None], axis=3)[..., 0]
        return result


def rank_bytes(by_home: Float64Array, factors: Float64Array, layout: RankLayout, exchange: Exchange) -> RankBytes:
    """Compute the bytes of every rank.

    Args:
        by_home: float64[tier, statistic, world] of ``sums_by_home``.
        factors: float64[tier, phase, link, statistic], ``byte_factors`` of the exchange.
    """
    return _spread_over_ranks(np.einsum("tpls,tsw->tplw", factors, by_home), layout, exchange)


def _spread_over_ranks(of_home: Float64Array, layout: RankLayout, exchange: Exchange) -> RankBytes:
    """Compute the bytes of every rank from float64[tier, phase, link, world], what the rows of each home add to the
    mean over all ranks."""
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    total = of_home.sum(axis=3, keepdims=True)
    by_node = of_home.reshape(*of_home.shape[:3], nodes, local)
    of_rail = np.broadcast_to(by_node.sum(axis=3, keepdims=True), by_node.shape).reshape(of_home.shape)
    of_node = np.broadcast_to(by_node.sum(axis=4, keepdims=True), by_node.shape).reshape(of_home.shape)
    sent = np.broadcast_to(total, of_home.shape).copy()
    received = sent.copy()

    def spread(tier: Tier, phase: Phase, link: TrafficLink, served: Float64Array, requested: Float64Array) -> None:
        """Requests and gradients go to the rank that served; rows and sums come from it."""
        out, into = (served, requested) if phase in (Phase.FORWARD_ROWS, Phase.SYNC_SUMS) else (requested, served)
        sent[tier, phase, link], received[tier, phase, link] = out, into

    def from_owners(tier: Tier, phase: Phase) -> None:
        """First hop of the chain: between the ranks of a node and the owner there."""
        rail, all_rows = of_rail[tier, phase, TrafficLink.INTRA_NODE], total[tier, phase, TrafficLink.INTRA_NODE]
        spread(tier, phase, TrafficLink.INTRA_NODE, local * rail, local / (local - 1) * (all_rows - rail))

    def from_homes_over_rails(tier: Tier, phase: Phase) -> None:
        mine = of_home[tier, phase, TrafficLink.INTER_NODE]
        others = of_rail[tier, phase, TrafficLink.INTER_NODE] - mine
        spread(tier, phase, TrafficLink.INTER_NODE, world * mine, world / (nodes - 1) * others)

    def from_homes(tier: Tier, phase: Phase) -> None:
        """Direct exchange: between every rank and every home."""
        if local > 1:
            mine = of_home[tier, phase, TrafficLink.INTRA_NODE]
            others = of_node[tier, phase, TrafficLink.INTRA_NODE] - mine
            spread(tier, phase, TrafficLink.INTRA_NODE, world * mine, world / (local - 1) * others)
        if nodes > 1:
            mine = of_home[tier, phase, TrafficLink.INTER_NODE]
            others = total[tier, phase, TrafficLink.INTER_NODE] - of_node[tier, phase, TrafficLink.INTER_NODE]
            spread(tier, phase, TrafficLink.INTER_NODE, world * mine, world / (world - local) * others)

    def even_over_rails(tier: Tier, phase: Phase) -> None:
        rail = local * of_rail[tier, phase, TrafficLink.INTER_NODE]
        sent[tier, phase, TrafficLink.INTER_NODE] = received[tier, phase, TrafficLink.INTER_NODE] = rail

    if exchange is Exchange.CHAIN:
        for tier in Tier:
            for phase in (*EXCHANGE_PHASES, Phase.SYNC_SUMS):
                if local > 1:
                    from_owners(tier, phase)
                if nodes > 1:
                    from_homes_over_rails(tier, phase)
            for phase in (Phase.SYNC_MASK, Phase.SYNC_ROWS):
                even_over_rails(tier, phase)
        return RankBytes(sent, received)
    for phase in EXCHANGE_PHASES:
        from_homes(Tier.HOME, phase)
        if local > 1:
            from_owners(Tier.NODE, phase)
    if exchange is Exchange.DIRECT_DEDUP:
        from_homes(Tier.DEVICE, Phase.BACKWARD_ROWS)
        from_homes(Tier.DEVICE, Phase.SYNC_SUMS)
    for phase in (Phase.SYNC_MASK, Phase.SYNC_ROWS):
        even_over_rails(Tier.NODE, phase)
    return RankBytes(sent, received)
