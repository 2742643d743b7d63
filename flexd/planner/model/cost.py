"""Cost of a placement per step, itemised by tier, phase and link, and the gain of a row at each tier at given prices
(docs/cost-model.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexd.core.arrays import Float64Array, UInt8Array
from flexd.core.errors import PlanError
from flexd.core.placement import RankLayout, Tier
from flexd.planner.model.prices import (
    EXCHANGE_PHASES,
    ID_BYTES,
    SYNC_PHASES,
    Exchange,
    TrafficPhase,
    byte_factors,
    exposed_share,
    latencies,
    migration_bytes,
    prices,
    slower_link_only,
)
from flexd.planner.model.workload import ROWS, STATISTICS, SYNCED, GroupLoad
from flexd.topology.cluster import INTRA, Cluster, Collective, Exposed, Link


@dataclass(frozen=True)
class CostBreakdown:
    """Cost per rank and optimizer step, in the mean over the ranks.

    Attributes:
        rows: float64[3], rows by tier (those the profile knows of).
        bytes: float64[3, 6, 2], sent, by (tier, phase, link).
        transfer_seconds: float64[3, 6, 2], those bytes at the bandwidth of their collective.
        latency_seconds: float64[6, 2], fixed cost of the collectives, by (phase, link).
        exposed: what of it cannot run beside compute.
        summed_at_home: copies are summed at their homes, because the gradients of all dim-groups travel narrower than
            they are added.
    """

    rows: Float64Array
    bytes: Float64Array
    transfer_seconds: Float64Array
    latency_seconds: Float64Array
    exposed: Exposed
    summed_at_home: bool = False

    @property
    def phase_seconds(self) -> Float64Array:
        """float64[6, 2]: time by (phase, link), hidden or not."""
        seconds: Float64Array = self.transfer_seconds.sum(axis=0) + self.latency_seconds
        return seconds

    @property
    def total_seconds(self) -> float:
        """All communication, hidden or not."""
        return float(self.phase_seconds.sum())

    @property
    def exposed_seconds(self) -> float:
        """Time that a step waits: what cannot run beside compute, and of the rest what is longer than the compute
        beside it. The optimiser minimises it."""
        share, seconds = exposed_share(self.exposed), self.phase_seconds.sum(axis=1)
        beside = float((1.0 - share) @ seconds)
        return float(share @ seconds) + max(0.0, beside - self.exposed.cover_seconds)

    @property
    def forward_seconds(self) -> float:
        """Time of requests and rows, which compute waits for."""
        return float(self.phase_seconds[[TrafficPhase.FORWARD_IDS, TrafficPhase.FORWARD_ROWS]].sum())

    @property
    def backward_seconds(self) -> float:
        return float(self.phase_seconds[TrafficPhase.BACKWARD_ROWS].sum())

    @property
    def sync_seconds(self) -> float:
        return float(self.phase_seconds[list(SYNC_PHASES)].sum())

    @property
    def ids_sent(self) -> float:
        """Number of keys requested over either link."""
        return float(self.bytes[:, TrafficPhase.FORWARD_IDS].sum()) / ID_BYTES

    def all_to_all_bytes(self, link: int) -> float:
        """Return the bytes of requests, rows and gradients of rows that are requested from other ranks."""
        return float(self.bytes[:, list(EXCHANGE_PHASES), link].sum()) - self._replica_gradients(link)

    def sync_bytes(self, link: int) -> float:
        """Return the bytes that copies add: gradients beside those of ``all_to_all_bytes``, sums and touched bits."""
        return float(self.bytes[:, list(SYNC_PHASES), link].sum()) + self._replica_gradients(link)

    def _replica_gradients(self, link: int) -> float:
        """Return the gradients of replicas. Inside a node those of NODE rows do not count."""
        tiers = [Tier.DEVICE] if link == INTRA else [Tier.NODE, Tier.DEVICE]
        return float(self.bytes[tiers, TrafficPhase.BACKWARD_ROWS, link].sum())

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form with units in the names."""
        links = {link.value: at for at, link in enumerate(Link)}
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
                for phase in TrafficPhase
            },
        }


def joint_cost(
    loads: Sequence[GroupLoad],
    tiers: Sequence[UInt8Array],
    cluster: Cluster,
    exchange: Exchange = Exchange.CHAIN,
    unlisted: Sequence[Float64Array] | None = None,
) -> CostBreakdown:
    """Return the cost of all dim-groups, which share the collectives of a step.

    Args:
        loads: of each dim-group; equal layout and shape.
        tiers: uint8[h] of each group's listed rows.
        unlisted: of each group float64[3], rows above HOME that are not listed, by tier (default: none).

    Raises:
        PlanError: no dim-group.
    """
    if not loads:
        raise PlanError("no dim-group to price", remedy="give the loads of all dim-groups")
    nothing = np.zeros(len(Tier))
    by_tier, sent = np.zeros((len(Tier), STATISTICS)), np.zeros((len(Tier), len(TrafficPhase), len(Link)))
    for i, load in enumerate(loads):
        of_group = load.by_tier(tiers[i], nothing if unlisted is None else unlisted[i])
        factors = byte_factors(load.layout, load.wire_bytes, exchange, at_home=load.sums_at_home)
        by_tier += of_group
        sent += np.einsum("tpls,ts->tpl", factors, of_group)
    seconds = sent * prices(sent, cluster, loads[0].shape.micro_batches, exchange)
    replicated = {int(tier) for tier in np.flatnonzero(by_tier[:, SYNCED] > 0)}
    return CostBreakdown(
        rows=by_tier[:, ROWS],
        bytes=sent,
        transfer_seconds=seconds if exchange is Exchange.CHAIN else slower_link_only(seconds),
        latency_seconds=step_latencies(loads, cluster, exchange, replicated),
        exposed=cluster.exposed,
        summed_at_home=all(load.sums_at_home for load in loads),
    )


def step_latencies(
    loads: Sequence[GroupLoad], cluster: Cluster, exchange: Exchange, replicated: set[int]
) -> Float64Array:
    """Return float64[6, 2]: ``latencies`` for these loads."""
    return latencies(
        cluster,
        loads[0].layout,
        exchange,
        replicated,
        micro_batches=loads[0].shape.micro_batches,
        trained=any(load.total[SYNCED] > 0 for load in loads),
        node_requests=Tier.NODE in replicated,
        at_home={load.sums_at_home for load in loads},
    )


def sync_latency(
    loads: Sequence[GroupLoad], cluster: Cluster, exchange: Exchange, exposed: Exposed, tiers: Collection[int]
) -> float:
    """Return the fixed exposed seconds per step of synchronising these tiers."""
    with_sync, without = (step_latencies(loads, cluster, exchange, set(each)) for each in (tiers, ()))
    return float(exposed_share(exposed) @ (with_sync - without).sum(axis=1))


def usable_tiers(layout: RankLayout, exchange: Exchange = Exchange.CHAIN) -> tuple[Tier, ...]:
    """Return the tiers above HOME that differ from each other in this layout and help under this exchange.

    A direct exchange requests rows from homes only, so a copy helps the rank that holds it and no other.
    """
    tiers = (Tier.NODE,) * (layout.nodes > 1) + (Tier.DEVICE,) * (layout.local_ranks > 1)
    return tiers if exchange is Exchange.CHAIN else tiers[-1:]


def canonical_tiers(tiers: UInt8Array, layout: RankLayout) -> UInt8Array:
    """Return usable tiers that hold the same copies: NODE of one node is HOME, DEVICE of one rank a node is NODE."""
    names = np.array([Tier.HOME, Tier.NODE, Tier.DEVICE], np.uint8)
    if layout.nodes == 1:
        names[Tier.NODE] = Tier.HOME
    if layout.local_ranks == 1:
        names[Tier.DEVICE] = names[Tier.NODE]
    return names[tiers]


def row_seconds(
    load: GroupLoad, cluster: Cluster, sent: Float64Array, exchange: Exchange = Exchange.CHAIN
) -> Float64Array:
    """Return float64[tier, statistic]: exposed seconds of one row as factors of its statistics.

    Args:
        sent: float64[3, 6, 2] bytes by (tier, phase, link): the message sizes at which bytes are priced.
    """
    table = byte_factors(load.layout, load.wire_bytes, exchange, at_home=load.sums_at_home)
    price = prices(sent, cluster, load.shape.micro_batches, exchange)
    if exchange is not Exchange.CHAIN:
        # The factors do not differ between rows, so all rows have the same slower link.
        per_row = price * table.sum(axis=3)
        price = np.where(slower_link_only(per_row) > 0, price, 0.0)
    seconds: Float64Array = np.einsum("tpls,tpl,p->ts", table, price, exposed_share(cluster.exposed))
    return seconds


def migration_seconds(load: GroupLoad, cluster: Cluster) -> Float64Array:
    """Return float64[tier]: time to bring one row up to the tier, bandwidth only."""
    link = Link.INTER_NODE if load.layout.nodes > 1 else Link.INTRA_NODE
    curve = cluster.curve(link, Collective.ALL_GATHER)
    sizes = migration_bytes(load.layout, load.spec.row_bytes + load.spec.state_bytes)
    # Rows migrate in large messages: the curve's last point.
    return sizes * curve.seconds_per_byte(curve.points[-1][0])


def decision_gains(
    load: GroupLoad, live: UInt8Array, cluster: Cluster, sent: Float64Array, exchange: Exchange, horizon_steps: float
) -> tuple[Float64Array, Float64Array]:
    """Return (gains to decide by, gains of the estimates), both float64[tier, h].

    The gain of a row at a tier is the exposed seconds that it saves there against HOME, linear in its statistics at
    given prices. To decide, a row that is now below a tier counts with the lower bound of its accesses and pays for its
    migration within the horizon; a row that is there counts with the upper bound.
    """
    factors = row_seconds(load, cluster, sent, exchange)
    factors = factors[Tier.HOME] - factors
    used = np.flatnonzero(factors.any(axis=0))
    factors = factors[:, used]

    def at(accesses: Float64Array) -> Float64Array:
        if np.array_equal(accesses, load.listed.accesses):
            return plain
        gains: Float64Array = factors @ load.statistics_at(accesses)[used]
        return gains

    plain: Float64Array = factors @ load.statistics[used]
    low, high = map(at, load.bounds)
    # A gain need not grow with the accesses, so the bound is taken of both ends.
    low, high = np.minimum(low, plain), np.maximum(high, plain)
    paid = (migration_seconds(load, cluster) / horizon_steps)[:, None]
    decision = low - paid
    decision[Tier.HOME] = 0.0
    if live.any():
        at_node, at_device = live == Tier.NODE, live == Tier.DEVICE
        decision[Tier.NODE, at_node | at_device] = high[Tier.NODE, at_node | at_device]
        decision[Tier.DEVICE, at_device] = high[Tier.DEVICE, at_device]
        step = np.minimum(low[Tier.DEVICE] - low[Tier.NODE], plain[Tier.DEVICE] - plain[Tier.NODE])
        from_node = high[Tier.NODE] + step - paid[Tier.DEVICE]
        decision[Tier.DEVICE, at_node] = from_node[at_node]
    return decision, plain


@dataclass(frozen=True)
class PredictedRange:
    """A predicted figure, and what it may be."""

    expected: float
    low: float
    high: float

    def scaled(self, factor: float) -> PredictedRange:
        """Return the range times a factor of at least 0."""
        return PredictedRange(factor * self.expected, factor * self.low, factor * self.high)


_ROUNDING = 1e-12


def missed_share(objective_seconds: float, home_seconds: float, lower_bound_seconds: float) -> float:
    """Return what may be missed of the largest possible saving, 0 to 1; 0 where nothing can be saved."""
    missed, possible = max(0.0, objective_seconds - lower_bound_seconds), home_seconds - lower_bound_seconds
    # Below the rounding of the sums.
    return min(1.0, missed / possible) if possible > _ROUNDING * home_seconds else 0.0
