"""Seconds a byte and a collective: the cluster's curves applied to a step's messages."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from flexd.layout import RankLayout, Tier
from flexd.planner.traffic import EXCHANGE_PHASES, SYNC_PHASES, Exchange, Phase, Where
from flexd.topology.model import Cluster, Collective, Link

Float64Array = npt.NDArray[np.float64]

LINKS = {Where.INTRA_NODE: Link.INTRA_NODE, Where.INTER_NODE: Link.INTER_NODE}


def exposed_share(cluster: Cluster) -> Float64Array:
    """float64[phase]: what compute does not hide."""
    exposed = cluster.exposed
    return np.array([exposed.forward, exposed.forward, exposed.backward, exposed.sync, exposed.sync])


def prices(sent: Float64Array, cluster: Cluster, micro_batches: int = 1) -> Float64Array:
    """float64[3, 5, 3] bytes by (tier, phase, link) -> seconds per byte of each item, same shape.

    The message of an exchange phase carries all tiers and dim-groups of one micro-batch; NODE and DEVICE rows are
    synchronised in collectives of their own, once a step. DEVICE rows go through a node as reduce-scatter and
    all-gather, each priced as half of the bytes.
    """
    result = np.zeros((len(Tier), len(Phase), len(Where)))
    for where, link in LINKS.items():
        for phase in EXCHANGE_PHASES:
            size = float(sent[:, phase, where].sum()) / micro_batches
            result[:, phase, where] = cluster.curve(link, Collective.ALL_TO_ALL).seconds_per_byte(size)
        for tier in (Tier.NODE, Tier.DEVICE):
            for phase in SYNC_PHASES:
                size = float(sent[tier, phase, where])
                halves = tier == Tier.DEVICE and phase == Phase.SYNC_ROWS and where == Where.INTRA_NODE
                collective = Collective.ALL_GATHER if halves else Collective.ALL_REDUCE
                curve = cluster.curve(link, collective)
                result[tier, phase, where] = curve.seconds_per_byte(size / 2 if halves else size)
    return result


def slower_link_only(seconds: Float64Array) -> Float64Array:
    """float64[3, 5, 3] with only the slower link of the HOME rows left in each exchange phase.

    A direct exchange is one all-to-all over the world that moves both links' bytes at the same time.
    """
    result = seconds.copy()
    for phase in EXCHANGE_PHASES:
        faster = np.arange(len(Where)) != int(seconds[Tier.HOME, phase].argmax())
        result[Tier.HOME, phase, faster] = 0.0
    return result


def latencies(
    cluster: Cluster,
    layout: RankLayout,
    exchange: Exchange,
    replicated: Collection[int],
    *,
    micro_batches: int = 1,
    backward_passes: int = 1,
    node_requests: bool = False,
) -> Float64Array:
    """float64[5, 3]: fixed seconds by (phase, link) of one optimizer step; all dim-groups share the collectives.

    An exchange is three all-to-alls forward (sizes, ids, rows) in each micro-batch, and one in each backward pass, on
    each hop that exists.

    Args:
        replicated: the tiers above HOME that hold trained rows: only these are synchronised.
        backward_passes: 0 if every table is frozen, 1 if micro-batches are merged, else as many as those.
        node_requests: a direct exchange asks node owners for NODE rows in an all-to-all of its own.
    """
    result = np.zeros((len(Phase), len(Where)))
    multi_node, multi_rank = layout.nodes > 1, layout.local_ranks > 1
    hops = [Where.INTRA_NODE] * multi_rank + [Where.INTER_NODE] * multi_node
    if exchange is not Exchange.CHAIN and not node_requests:
        hops = hops[-1:]
    for where in hops:
        once = cluster.curve(LINKS[where], Collective.ALL_TO_ALL).latency_seconds
        result[Phase.FORWARD_IDS, where] = 2 * once * micro_batches
        result[Phase.FORWARD_ROWS, where] = once * micro_batches
        result[Phase.BACKWARD_ROWS, where] = once * backward_passes
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
