"""What a placement costs a step: bytes and seconds, itemised by tier, phase and link (docs/cost-model.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.layout import RankLayout, Tier
from flexd.planner.traffic import ID_BYTES, Phase, Where, chain_traffic, direct_traffic
from flexd.planner.workload import ROWS, STATISTICS, GroupLoad, statistics
from flexd.topology.model import Cluster, Collective, Link

Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]

_LINKS = {Where.INTRA_NODE: Link.INTRA_NODE, Where.INTER_NODE: Link.INTER_NODE}
_EXCHANGE = (Phase.FORWARD_IDS, Phase.FORWARD_ROWS, Phase.BACKWARD_ROWS)
_SYNC = (Phase.SYNC_MASK, Phase.SYNC_ROWS)


class Exchange(Enum):
    """How looked-up rows travel."""

    CHAIN = "chain"
    """Self, node owner, home: what flexd runs."""
    DIRECT = "direct"
    """Every rank to every home, every access."""
    DIRECT_DEDUP = "direct_dedup"
    """Every rank to every home, each row once a rank."""


@dataclass(frozen=True)
class CostBreakdown:
    """Per rank and step, mean over the ranks.

    Attributes:
        rows: float64[3], rows by tier (those the profile knows of).
        bytes: float64[3, 5, 3], sent, by (tier, phase, link); link SELF holds the row bytes answered without traffic.
        transfer_seconds: float64[3, 5, 3], those bytes at the bandwidth of their collective.
        latency_seconds: float64[5, 3], fixed cost of the collectives, by (phase, link).
        exposed_share: float64[5], by phase, what compute does not hide.
    """

    rows: Float64Array
    bytes: Float64Array
    transfer_seconds: Float64Array
    latency_seconds: Float64Array
    exposed_share: Float64Array

    @property
    def phase_seconds(self) -> Float64Array:
        """float64[5, 3]: time by (phase, link), hidden or not."""
        seconds: Float64Array = self.transfer_seconds.sum(axis=0) + self.latency_seconds
        return seconds

    @property
    def total_seconds(self) -> float:
        """All communication, hidden or not."""
        return float(self.phase_seconds.sum())

    @property
    def exposed_seconds(self) -> float:
        """What the step waits for: the figure plans are compared by."""
        return float(self.exposed_share @ self.phase_seconds.sum(axis=1))

    @property
    def forward_seconds(self) -> float:
        """Requests and rows: nothing computes until they are done."""
        return float(self.phase_seconds[[Phase.FORWARD_IDS, Phase.FORWARD_ROWS]].sum())

    @property
    def backward_seconds(self) -> float:
        return float(self.phase_seconds[Phase.BACKWARD_ROWS].sum())

    @property
    def sync_seconds(self) -> float:
        return float(self.phase_seconds[list(_SYNC)].sum())

    @property
    def ids_sent(self) -> float:
        """Keys requested over either link."""
        return float(self.bytes[:, Phase.FORWARD_IDS, 1:].sum()) / ID_BYTES

    def all_to_all_bytes(self, where: Where) -> float:
        return float(self.bytes[:, list(_EXCHANGE), where].sum())

    def sync_bytes(self, where: Where) -> float:
        return float(self.bytes[:, list(_SYNC), where].sum())

    def __add__(self, other: CostBreakdown) -> CostBreakdown:
        """Costs of two dim-groups, whose collectives follow one another."""
        return CostBreakdown(
            self.rows + other.rows,
            self.bytes + other.bytes,
            self.transfer_seconds + other.transfer_seconds,
            self.latency_seconds + other.latency_seconds,
            self.exposed_share,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with units in the names."""
        links = {"intra_node": Where.INTRA_NODE, "inter_node": Where.INTER_NODE}
        return {
            "exposed_seconds": self.exposed_seconds,
            "total_seconds": self.total_seconds,
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
            "sync_seconds": self.sync_seconds,
            "ids_sent": self.ids_sent,
            "bytes": {
                name: {"all_to_all": self.all_to_all_bytes(where), "sync": self.sync_bytes(where)}
                for name, where in links.items()
            },
            "phases": {
                phase.name.lower(): {
                    name: {
                        "bytes": float(self.bytes[:, phase, where].sum()),
                        "seconds": float(self.phase_seconds[phase, where]),
                    }
                    for name, where in links.items()
                }
                for phase in Phase
            },
            "tiers": {
                tier.name: {
                    "rows": float(self.rows[tier]),
                    "self_bytes": float(self.bytes[tier, :, Where.SELF].sum()),
                    "intra_node_bytes": float(self.bytes[tier, :, Where.INTRA_NODE].sum()),
                    "inter_node_bytes": float(self.bytes[tier, :, Where.INTER_NODE].sum()),
                    "seconds": float(self.transfer_seconds[tier].sum()),
                }
                for tier in Tier
            },
        }


def tier_sums(
    load: GroupLoad, tiers: UInt8Array, layout: RankLayout, unlisted: Float64Array, listed: Float64Array
) -> Float64Array:
    """float64[3, 5]: the statistics summed over the rows of each tier.

    Args:
        tiers: uint8[h], of the listed rows; the bins are HOME.
        unlisted: float64[3], rows above HOME that are not listed, by tier: taken out of the bins at their mean.
        listed: float64[5, h], statistics of the listed rows.
    """
    sums = np.zeros((len(Tier), STATISTICS))
    of_tier = tiers.astype(np.intp)
    for statistic in range(STATISTICS):
        sums[:, statistic] = np.bincount(of_tier, weights=listed[statistic], minlength=len(Tier))
    sums[Tier.HOME] += statistics(load.bin_accesses, layout) @ load.bin_rows
    if unlisted.any():
        one = statistics(np.array([load.tail_accesses]), layout)[:, 0]
        sums += unlisted[:, None] * one
        sums[Tier.HOME] = np.maximum(sums[Tier.HOME] - unlisted.sum() * one, 0.0)
    return sums


def exposed_share(cluster: Cluster) -> Float64Array:
    """float64[phase]."""
    exposed = cluster.exposed
    return np.array([exposed.forward, exposed.forward, exposed.backward, exposed.sync, exposed.sync])


def traffic_of(load: GroupLoad, layout: RankLayout, exchange: Exchange) -> Float64Array:
    """The traffic table of this exchange for the load's row size."""
    if exchange is Exchange.CHAIN:
        return chain_traffic(layout, load.row_bytes)
    return direct_traffic(layout, load.row_bytes, dedup=exchange is Exchange.DIRECT_DEDUP)


def prices(sent: Float64Array, cluster: Cluster) -> Float64Array:
    """float64[3, 5, 3] bytes by (tier, phase, link) -> seconds per byte of each item, same shape.

    The message of an exchange phase carries all tiers together; NODE and DEVICE rows are synchronised in collectives of
    their own. DEVICE rows go through a node as reduce-scatter and all-gather, each priced as half of the bytes.
    """
    result = np.zeros((len(Tier), len(Phase), len(Where)))
    for where, link in _LINKS.items():
        for phase in _EXCHANGE:
            size = float(sent[:, phase, where].sum())
            result[:, phase, where] = cluster.curve(link, Collective.ALL_TO_ALL).seconds_per_byte(size)
        for tier in (Tier.NODE, Tier.DEVICE):
            for phase in _SYNC:
                size = float(sent[tier, phase, where])
                halves = tier == Tier.DEVICE and phase == Phase.SYNC_ROWS and where == Where.INTRA_NODE
                collective = Collective.ALL_GATHER if halves else Collective.ALL_REDUCE
                curve = cluster.curve(link, collective)
                result[tier, phase, where] = curve.seconds_per_byte(size / 2 if halves else size)
    return result


def latencies(cluster: Cluster, layout: RankLayout, exchange: Exchange, replicated: UInt8Array) -> Float64Array:
    """float64[5, 3]: fixed seconds by (phase, link) of one dim-group.

    An exchange is three all-to-alls forward (sizes, ids, rows) and one backward, on each hop that exists.
    ``replicated`` are the tiers above HOME that hold rows: only these are synchronised.
    """
    result = np.zeros((len(Phase), len(Where)))
    multi_node, multi_rank = layout.nodes > 1, layout.local_ranks > 1
    hops = [Where.INTRA_NODE] * multi_rank + [Where.INTER_NODE] * multi_node
    if exchange is not Exchange.CHAIN:
        hops = hops[-1:]
    for where in hops:
        once = cluster.curve(_LINKS[where], Collective.ALL_TO_ALL).latency_seconds
        result[Phase.FORWARD_IDS, where] = 2 * once
        result[Phase.FORWARD_ROWS, where] = once
        result[Phase.BACKWARD_ROWS, where] = once
    inter = cluster.curve(Link.INTER_NODE, Collective.ALL_REDUCE).latency_seconds
    if Tier.NODE in replicated and multi_node:
        result[Phase.SYNC_MASK, Where.INTER_NODE] += inter
        result[Phase.SYNC_ROWS, Where.INTER_NODE] += inter
    if Tier.DEVICE in replicated:
        if multi_node:
            result[Phase.SYNC_MASK, Where.INTER_NODE] += inter
            result[Phase.SYNC_ROWS, Where.INTER_NODE] += inter
        elif multi_rank:
            intra = cluster.curve(Link.INTRA_NODE, Collective.ALL_REDUCE).latency_seconds
            result[Phase.SYNC_MASK, Where.INTRA_NODE] += intra
        if multi_rank:
            gather = cluster.curve(Link.INTRA_NODE, Collective.ALL_GATHER).latency_seconds
            result[Phase.SYNC_ROWS, Where.INTRA_NODE] += 2 * gather
    return result


def group_cost(
    load: GroupLoad,
    tiers: UInt8Array,
    layout: RankLayout,
    cluster: Cluster,
    exchange: Exchange = Exchange.CHAIN,
    unlisted: Float64Array | None = None,
    listed: Float64Array | None = None,
) -> CostBreakdown:
    """Cost of one dim-group.

    Args:
        tiers: uint8[h] tiers of ``load.keys``.
        unlisted: float64[3] rows above HOME that are not among them, by tier (default: none).
        listed: float64[5, h] statistics of the listed rows, if the caller has them.
    """
    unlisted = np.zeros(len(Tier)) if unlisted is None else unlisted
    listed = statistics(load.accesses, layout) if listed is None else listed
    sums = tier_sums(load, tiers, layout, unlisted, listed)
    sent: Float64Array = np.einsum("tpls,ts->tpl", traffic_of(load, layout, exchange), sums)
    seconds = sent * prices(sent, cluster)
    if exchange is not Exchange.CHAIN:
        # One all-to-all over the world moves both links' bytes at the same time: the slower link is the time.
        seconds[seconds < seconds.max(axis=2, keepdims=True)] = 0.0
    replicated = np.flatnonzero(sums[:, ROWS] > 0).astype(np.uint8)
    return CostBreakdown(
        rows=sums[:, ROWS],
        bytes=sent,
        transfer_seconds=seconds,
        latency_seconds=latencies(cluster, layout, exchange, replicated),
        exposed_share=exposed_share(cluster),
    )


def total_cost(costs: Iterable[CostBreakdown]) -> CostBreakdown:
    """The dim-groups together. At least one."""
    return reduce(CostBreakdown.__add__, costs)
