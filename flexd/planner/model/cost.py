"""Cost of a placement per step: bytes and seconds, itemised by tier, phase and link (docs/cost-model.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.prices import exposed_seconds, exposed_share, latencies, prices, slower_link_only
from flexd.planner.model.row_bytes import (
    EXCHANGE_PHASES,
    ID_BYTES,
    SYNC_PHASES,
    Exchange,
    Phase,
    TrafficLink,
    byte_factors,
)
from flexd.planner.model.workload import ROWS, STATISTICS, SYNCED, GroupLoad
from flexd.topology.cluster import Cluster

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class CostBreakdown:
    """Cost per rank and optimizer step, in the mean over the ranks.

    Attributes:
        rows: float64[3], rows by tier (those the profile knows of).
        bytes: float64[3, 6, 3], sent, by (tier, phase, link); link SELF holds the bytes of rows that a rank has itself.
        transfer_seconds: float64[3, 6, 3], those bytes at the bandwidth of their collective.
        latency_seconds: float64[6, 3], fixed cost of the collectives, by (phase, link).
        exposed_share: float64[6], by phase, share that cannot run beside compute.
        summed_at_home: copies are summed at their homes, because the gradients of all dim-groups travel narrower than
            they are added.
        cover_seconds: compute beside which the rest can run.
    """

    rows: Float64Array
    bytes: Float64Array
    transfer_seconds: Float64Array
    latency_seconds: Float64Array
    exposed_share: Float64Array
    summed_at_home: bool = False
    cover_seconds: float = math.inf

    @property
    def phase_seconds(self) -> Float64Array:
        """float64[6, 3]: time by (phase, link), hidden or not."""
        seconds: Float64Array = self.transfer_seconds.sum(axis=0) + self.latency_seconds
        return seconds

    @property
    def total_seconds(self) -> float:
        """All communication, hidden or not."""
        return float(self.phase_seconds.sum())

    @property
    def exposed_seconds(self) -> float:
        """Time that a step waits. The optimiser minimises it."""
        return exposed_seconds(self.exposed_share, self.cover_seconds, self.phase_seconds.sum(axis=1))

    @property
    def forward_seconds(self) -> float:
        """Time of requests and rows, which compute waits for."""
        return float(self.phase_seconds[[Phase.FORWARD_IDS, Phase.FORWARD_ROWS]].sum())

    @property
    def backward_seconds(self) -> float:
        return float(self.phase_seconds[Phase.BACKWARD_ROWS].sum())

    @property
    def sync_seconds(self) -> float:
        return float(self.phase_seconds[list(SYNC_PHASES)].sum())

    @property
    def ids_sent(self) -> float:
        """Number of keys requested over either link."""
        return float(self.bytes[:, Phase.FORWARD_IDS, 1:].sum()) / ID_BYTES

    def all_to_all_bytes(self, link: TrafficLink) -> float:
        """Return the bytes of requests, rows and gradients of rows that are requested from other ranks."""
        return float(self.bytes[:, list(EXCHANGE_PHASES), link].sum()) - self._replica_gradients(link)

    def sync_bytes(self, link: TrafficLink) -> float:
        """Return the bytes that copies add: gradients beside those of ``all_to_all_bytes``, sums and touched bits."""
        return float(self.bytes[:, list(SYNC_PHASES), link].sum()) + self._replica_gradients(link)

    def _replica_gradients(self, link: TrafficLink) -> float:
        """Return the gradients of replicas. Inside a node those of NODE rows do not count."""
        tiers = [Tier.DEVICE] if link == TrafficLink.INTRA_NODE else [Tier.NODE, Tier.DEVICE]
        return float(self.bytes[tiers, Phase.BACKWARD_ROWS, link].sum())

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form with units in the names."""
        links = {"intra_node": TrafficLink.INTRA_NODE, "inter_node": TrafficLink.INTER_NODE}
        return {
            "exposed_seconds": self.exposed_seconds,
            "total_seconds": self.total_seconds,
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
            "sync_seconds": self.sync_seconds,
            "ids_sent": self.ids_sent,
            "bytes": {
                name: {"all_to_all": self.all_to_all_bytes(link), "sync": self.sync_bytes(link)}
                for name, link in links.items()
            },
            "phases": {
                phase.name.lower(): {
                    name: {
                        "bytes": float(self.bytes[:, phase, link].sum()),
                        "seconds": float(self.phase_seconds[phase, link]),
                    }
                    for name, link in links.items()
                }
                for phase in Phase
            },
        }


@dataclass(frozen=True)
class LoadSums:
    """The load of one dim-group with cached sums."""

    load: GroupLoad
    layout: RankLayout

    @cached_property
    def listed(self) -> Float64Array:
        """float64[statistics, h]."""
        return self.load.listed_statistics(self.layout)

    @cached_property
    def _listed_sum(self) -> Float64Array:
        summed: Float64Array = self.listed.sum(axis=1)
        return summed

    @cached_property
    def _bin_sum(self) -> Float64Array:
        summed: Float64Array = self.load.bin_statistics(self.layout) @ self.load.bin_rows
        return summed

    @cached_property
    def has_trained(self) -> bool:
        """True if any row of the load is trained."""
        return bool(self._listed_sum[SYNCED] + self._bin_sum[SYNCED] > 0)

    def even(self, unlisted: Float64Array) -> Float64Array:
        """Return float64[tier, statistic] of unlisted rows, of which ``unlisted`` float64[tier] are above HOME."""
        sums = np.zeros((len(Tier), STATISTICS))
        sums[Tier.HOME] = self._bin_sum
        if unlisted.any():
            one = self.load.tail_statistics(self.layout)
            sums += unlisted[:, None] * one
            sums[Tier.HOME] = np.maximum(sums[Tier.HOME] - unlisted.sum() * one, 0.0)
        return sums

    def total(self) -> Float64Array:
        """Return float64[statistic] summed over all rows."""
        summed: Float64Array = self._listed_sum + self._bin_sum
        return summed

    def by_tier(self, tiers: UInt8Array, even: Float64Array) -> Float64Array:
        """Return float64[tier, statistic] summed over all rows."""
        sums = even.copy()
        sums[Tier.HOME] += self._listed_sum
        for tier in (Tier.NODE, Tier.DEVICE):
            moved = self.listed[:, np.flatnonzero(tiers == tier)].sum(axis=1)
            sums[tier] += moved
            sums[Tier.HOME] -= moved
        return np.maximum(sums, 0.0)


def joint_cost(
    sums: Sequence[LoadSums],
    tiers: Sequence[UInt8Array],
    cluster: Cluster,
    exchange: Exchange = Exchange.CHAIN,
    unlisted: Sequence[Float64Array] | None = None,
) -> CostBreakdown:
    """Return the cost of all dim-groups, which share the collectives of a step.

    Args:
        sums: of each dim-group; equal layout and micro-batches.
        tiers: uint8[h] of each group's listed rows.
        unlisted: of each group float64[3], rows above HOME that are not listed, by tier (default: none).

    Raises:
        PlanError: no dim-group.
    """
    if not sums:
        raise PlanError("no dim-group to price", remedy="give the loads of all dim-groups")
    layout = sums[0].layout
    nothing = np.zeros(len(Tier))
    by_tier, sent = np.zeros((len(Tier), STATISTICS)), np.zeros((len(Tier), len(Phase), len(TrafficLink)))
    for i, group in enumerate(sums):
        of_group = group.by_tier(tiers[i], group.even(nothing if unlisted is None else unlisted[i]))
        factors = byte_factors(layout, group.load.wire_bytes, exchange, at_home=group.load.sums_at_home)
        by_tier += of_group
        sent += np.einsum("tpls,ts->tpl", factors, of_group)
    seconds = sent * prices(sent, cluster, sums[0].load.micro_batches, exchange)
    return CostBreakdown(
        rows=by_tier[:, ROWS],
        bytes=sent,
        transfer_seconds=seconds if exchange is Exchange.CHAIN else slower_link_only(seconds),
        latency_seconds=step_latencies(
            sums, cluster, exchange, {int(tier) for tier in np.flatnonzero(by_tier[:, SYNCED] > 0)}
        ),
        exposed_share=exposed_share(cluster),
        cover_seconds=cluster.exposed.cover_seconds,
        summed_at_home=all(group.load.sums_at_home for group in sums),
    )


def step_latencies(
    sums: Sequence[LoadSums], cluster: Cluster, exchange: Exchange, replicated: set[int]
) -> Float64Array:
    """Return float64[6, 3]: ``latencies`` for these loads."""
    first = sums[0].load
    passes = 1 if first.merged_backward else first.micro_batches
    return latencies(
        cluster,
        sums[0].layout,
        exchange,
        replicated,
        micro_batches=first.micro_batches,
        backward_passes=passes if any(group.has_trained for group in sums) else 0,
        node_requests=Tier.NODE in replicated,
        at_home={group.load.sums_at_home for group in sums},
    )
