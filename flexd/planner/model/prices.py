"""Seconds per byte and a collective: the cluster's curves applied to a step's messages."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.row_bytes import EXCHANGE_PHASES, Exchange, Phase, TrafficLink
from flexd.topology.cluster import Cluster, Collective, Exposed, Link

Float64Array = npt.NDArray[np.float64]

CLUSTER_LINKS = {TrafficLink.INTRA_NODE: Link.INTRA_NODE, TrafficLink.INTER_NODE: Link.INTER_NODE}


def exposed_share(cluster: Cluster) -> Float64Array:
    """Return float64[phase]: share of each phase that cannot run beside compute."""
    exposed = cluster.exposed
    share = {
        Phase.FORWARD_IDS: exposed.forward,
        Phase.FORWARD_ROWS: exposed.forward,
        Phase.BACKWARD_ROWS: exposed.backward,
    }
    return np.array([share.get(phase, exposed.sync) for phase in Phase])


def exposed_seconds(share: Float64Array, cover_seconds: float, seconds: Float64Array) -> float:
    """Return what a step waits for: of float64[phase] seconds the ``share`` that cannot run beside compute, and of the
    rest what is longer than the compute beside it."""
    return float(share @ seconds) + max(0.0, float((1.0 - share) @ seconds) - cover_seconds)


def linear_exposure(cluster: Cluster, seconds: Float64Array) -> Cluster:
    """Return the cluster with the exposure of a small change at float64[phase] seconds of communication.

    Where compute covers all that runs beside it, a byte counts by the phase's share; beyond, every byte counts whole.
    Exposed seconds are convex in the communication, so no change saves more than this says.
    """
    exposed = cluster.exposed
    if math.isinf(exposed.cover_seconds):
        return cluster
    covered = float((1.0 - exposed_share(cluster)) @ seconds) <= exposed.cover_seconds
    return cluster.with_exposed(replace(exposed, cover_seconds=math.inf) if covered else Exposed())


_OVER_THE_WORLD = (
    *((Tier.HOME, phase) for phase in EXCHANGE_PHASES),
    (Tier.DEVICE, Phase.BACKWARD_ROWS),
    (Tier.DEVICE, Phase.SYNC_SUMS),
)
"""All-to-alls over all ranks in a direct exchange: HOME rows, and the gradients and sums of DEVICE rows."""


def prices(
    sent: Float64Array, cluster: Cluster, micro_batches: int = 1, exchange: Exchange = Exchange.CHAIN
) -> Float64Array:
    """Return seconds per byte of each item of float64[3, 6, 3] bytes by (tier, phase, link), same shape.

    A message carries all tiers and dim-groups: of an exchange phase those of one micro-batch, of a synchronisation
    phase those of a step. Touched bits travel with ids and rows. All-to-alls of a direct exchange that leave the node
    are priced as those over all ranks, where the cluster has them.
    """
    result = np.zeros((len(Tier), len(Phase), len(TrafficLink)))
    for link, cluster_link in CLUSTER_LINKS.items():
        all_to_all = cluster.curve(cluster_link, Collective.ALL_TO_ALL)
        sizes = sent[:, :, link].sum(axis=0)
        for phase in EXCHANGE_PHASES:
            result[:, phase, link] = all_to_all.seconds_per_byte(float(sizes[phase]) / micro_batches)
        result[:, Phase.SYNC_MASK, link] = result[:, Phase.FORWARD_ROWS, link]
        result[:, Phase.SYNC_SUMS, link] = all_to_all.seconds_per_byte(float(sizes[Phase.SYNC_SUMS]))
        all_reduce = cluster.curve(cluster_link, Collective.ALL_REDUCE)
        result[:, Phase.SYNC_ROWS, link] = all_reduce.seconds_per_byte(float(sizes[Phase.SYNC_ROWS]))
    if exchange is not Exchange.CHAIN and cluster.world is not None:
        sizes = sent[:, :, TrafficLink.INTER_NODE].sum(axis=0)
        for tier, phase in _OVER_THE_WORLD:
            size = float(sizes[phase]) / (micro_batches if phase in EXCHANGE_PHASES else 1)
            result[tier, phase, TrafficLink.INTER_NODE] = cluster.world.all_to_all.seconds_per_byte(size)
        mask = result[Tier.HOME, Phase.FORWARD_ROWS, TrafficLink.INTER_NODE]
        result[Tier.DEVICE, Phase.SYNC_MASK, TrafficLink.INTER_NODE] = mask
    return result


def slower_link_only(seconds: Float64Array) -> Float64Array:
    """Return float64[3, 6, 3] with only the slower link left in each all-to-all over the world, which moves both
    links' bytes at the same time."""
    result = seconds.copy()
    for tier, phase in _OVER_THE_WORLD:
        faster = np.arange(len(TrafficLink)) != int(seconds[tier, phase].argmax())
        result[tier, phase, faster] = 0.0
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
    at_home: Collection[bool] = (False,),
) -> Float64Array:
    """Return float64[6, 3]: fixed seconds by (phase, link) of an optimizer step; dim-groups share the collectives.

    An exchange is three all-to-alls forward (sizes, ids, rows) in each micro-batch, and one in each backward pass, on
    each hop that exists.

    Args:
        replicated: the tiers that hold trained rows: those above HOME are synchronised.
        backward_passes: 0 if every table is frozen, 1 if micro-batches are merged, else as many as those.
        node_requests: a direct exchange requests NODE rows from node owners in an all-to-all of its own.
        at_home: ``GroupLoad.sums_at_home`` of the dim-groups; decides between an all-reduce and an all-to-all of sums.
    """
    result = np.zeros((len(Phase), len(TrafficLink)))
    multi_node, multi_rank = layout.nodes > 1, layout.local_ranks > 1
    every_hop = [TrafficLink.INTRA_NODE] * multi_rank + [TrafficLink.INTER_NODE] * multi_node
    hops = every_hop if exchange is Exchange.CHAIN or node_requests else every_hop[-1:]
    all_to_all = {link: cluster.curve(CLUSTER_LINKS[link], Collective.ALL_TO_ALL).latency_seconds for link in every_hop}
    if exchange is not Exchange.CHAIN and cluster.world is not None:
        all_to_all[TrafficLink.INTER_NODE] = cluster.world.all_to_all.latency_seconds
    for link in hops:
        result[Phase.FORWARD_IDS, link] = 2 * all_to_all[link] * micro_batches
        result[Phase.FORWARD_ROWS, link] = all_to_all[link] * micro_batches
        result[Phase.BACKWARD_ROWS, link] = all_to_all[link] * backward_passes
    if not {Tier.NODE, Tier.DEVICE}.intersection(replicated):
        return result
    everywhere = Tier.DEVICE in replicated
    if exchange is Exchange.DIRECT_DEDUP:
        for link in every_hop[-1:] * everywhere:
            result[Phase.SYNC_SUMS, link] = all_to_all[link]
        all_reduces = multi_node and Tier.NODE in replicated
    else:
        all_reduces = multi_node and not all(at_home)
        if multi_node and any(at_home):
            result[Phase.SYNC_SUMS, TrafficLink.INTER_NODE] = all_to_all[TrafficLink.INTER_NODE]
        if everywhere and multi_rank:
            result[Phase.SYNC_SUMS, TrafficLink.INTRA_NODE] = all_to_all[TrafficLink.INTRA_NODE]
    if all_reduces:
        once = cluster.curve(Link.INTER_NODE, Collective.ALL_REDUCE).latency_seconds
        result[Phase.SYNC_ROWS, TrafficLink.INTER_NODE] = once
    return result
