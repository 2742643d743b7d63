"""Gain of a row at each tier: exposed seconds saved against HOME, linear in its statistics at given prices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.cost import LoadSums
from flexd.planner.model.prices import exposed_share, prices, slower_link_only
from flexd.planner.model.row_bytes import Exchange, byte_factors, migration_bytes
from flexd.planner.model.workload import GroupLoad
from flexd.topology.cluster import Cluster, Collective, Link

Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]


def usable_tiers(layout: RankLayout, exchange: Exchange = Exchange.CHAIN) -> tuple[Tier, ...]:
    """Return the tiers above HOME that differ from each other in this layout and help under this exchange.

    A direct exchange requests rows from homes only, so a copy helps the rank that holds it and no other.
    """
    if exchange is not Exchange.CHAIN:
        if layout.local_ranks > 1:
            return (Tier.DEVICE,)
        return (Tier.NODE,) if layout.nodes > 1 else ()
    tiers = []
    if layout.nodes > 1:
        tiers.append(Tier.NODE)
    if layout.local_ranks > 1:
        tiers.append(Tier.DEVICE)
    return tuple(tiers)


def canonical_tiers(tiers: UInt8Array, layout: RankLayout) -> UInt8Array:
    """Return usable tiers that hold the same copies: NODE of one node is HOME, DEVICE of one rank a node is NODE."""
    names = np.array([Tier.HOME, Tier.NODE, Tier.DEVICE], np.uint8)
    if layout.nodes == 1:
        names[Tier.NODE] = Tier.HOME
    if layout.local_ranks == 1:
        names[Tier.DEVICE] = names[Tier.NODE]
    return names[tiers]


def row_seconds(
    load: GroupLoad, layout: RankLayout, cluster: Cluster, sent: Float64Array, exchange: Exchange = Exchange.CHAIN
) -> Float64Array:
    """Return float64[tier, statistic]: exposed seconds of one row as factors of its statistics.

    Args:
        sent: float64[3, 6, 3] bytes by (tier, phase, link): the message sizes at which bytes are priced.
    """
    table = byte_factors(layout, load.wire_bytes, exchange, at_home=load.sums_at_home)
    price = prices(sent, cluster, load.micro_batches, exchange)
    if exchange is not Exchange.CHAIN:
        # The factors do not differ between rows, so all rows have the same slower link.
        per_row = price * table.sum(axis=3)
        price = np.where(slower_link_only(per_row) > 0, price, 0.0)
    seconds: Float64Array = np.einsum("tpls,tpl,p->ts", table, price, exposed_share(cluster))
    return seconds


def migration_seconds(load: GroupLoad, layout: RankLayout, cluster: Cluster) -> Float64Array:
    """Return float64[tier]: time to bring one row up to the tier, bandwidth only."""
    link = Link.INTER_NODE if layout.nodes > 1 else Link.INTRA_NODE
    curve = cluster.curve(link, Collective.ALL_GATHER)
    sizes = migration_bytes(layout, load.row_bytes + load.state_bytes)
    # Rows migrate in large messages: the curve's last point.
    return sizes * curve.seconds_per_byte(curve.points[-1][0])


def decision_gains(
    sums: LoadSums, live: UInt8Array, cluster: Cluster, sent: Float64Array, exchange: Exchange, horizon_steps: float
) -> tuple[Float64Array, Float64Array]:
    """Return (gains to decide by, gains of the estimates), both float64[tier, h].

    To decide, a row that is now below a tier counts with the lower bound of its accesses and pays for its migration
    within the horizon; a row that is there counts with the upper bound.
    """
    load, layout = sums.load, sums.layout
    factors = row_seconds(load, layout, cluster, sent, exchange)
    factors = factors[Tier.HOME] - factors
    used = np.flatnonzero(factors.any(axis=0))
    factors = factors[:, used]

    def at(accesses: Float64Array) -> Float64Array:
        if np.array_equal(accesses, load.accesses):
            return plain
        gains: Float64Array = factors @ load.listed_statistics(layout, accesses)[used]
        return gains

    plain: Float64Array = factors @ sums.listed[used]
    low, high = at(load.accesses_lower), at(load.accesses_upper)
    # A gain need not grow with the accesses, so the bound is taken of both ends.
    low, high = np.minimum(low, plain), np.maximum(high, plain)
    paid = (migration_seconds(load, layout, cluster) / horizon_steps)[:, None]
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
