"""Bytes of a row on each link at each tier, and the seconds that they take: the cluster's curves applied to a step's
messages, and corrected by what steps report.

Byte factors are float64[tier, phase, link, statistic]: bytes per rank and optimizer step of one row at that tier, as
factors of its statistics (``workload``). Bytes are those a rank sends, averaged over the ranks. Derivations:
docs/cost-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, IntEnum

import numpy as np

from flexd.core.arrays import Float64Array
from flexd.core.placement import RankLayout, Tier
from flexd.planner.model.workload import (
    ANYWHERE,
    BACK_PER_NODE,
    BACK_PER_RANK,
    PER_NODE,
    PER_RANK,
    STATISTICS,
    SYNCED,
)
from flexd.topology.cluster import INTER, INTRA, Cluster, Collective, Exposed, Link

ID_BYTES = 8
"""One requested key on one hop."""


class Exchange(Enum):
    """Route of looked-up rows."""

    CHAIN = "chain"
    """Self, node owner, home; each row once a station."""
    DIRECT_DEDUP = "direct_dedup"
    """Every rank to every home, each row once per rank."""


class TrafficPhase(IntEnum):
    """The parts of a step's communication."""

    FORWARD_IDS = 0
    """Requests: keys on their way to the station that holds the row."""
    FORWARD_ROWS = 1
    """Row values on their way back."""
    BACKWARD_ROWS = 2
    """Gradients on their way to the home rank, or of replicated rows to the rank of the node that holds them."""
    SYNC_MASK = 3
    """Which replicated rows were touched: one bit per row, with ids towards the home and with rows back."""
    SYNC_ROWS = 4
    """Gradients of the touched replicated rows, all-reduced."""
    SYNC_SUMS = 5
    """Sums of those gradients, from the rank that adds them to the copies that took no part."""


EXCHANGE_PHASES = (TrafficPhase.FORWARD_IDS, TrafficPhase.FORWARD_ROWS, TrafficPhase.BACKWARD_ROWS)
SYNC_PHASES = (TrafficPhase.SYNC_MASK, TrafficPhase.SYNC_ROWS, TrafficPhase.SYNC_SUMS)
_SHAPE = (len(Tier), len(TrafficPhase), len(Link), STATISTICS)


def byte_factors(layout: RankLayout, row_bytes: int, exchange: Exchange, *, at_home: bool = False) -> Float64Array:
    """Return float64[tier, phase, link, statistic] of this exchange.

    Args:
        row_bytes: of one row on the wire.
        at_home: ``GroupLoad.sums_at_home``.
    """
    if exchange is Exchange.CHAIN:
        return _chain_byte_factors(layout, row_bytes, at_home=at_home)
    return _direct_byte_factors(layout, row_bytes)


def _chain_byte_factors(layout: RankLayout, row_bytes: int, *, at_home: bool) -> Float64Array:
    """Return the factors of the chain self -> node owner -> home.

    Gradients of replicated rows climb to the node owner as those of HOME rows do, the owners of a rail all-reduce them,
    and the ranks of a node that hold copies receive the sums. With ``at_home`` the owners send them to the home
    instead, and the home the sums.
    """
    nodes, local = layout.nodes, layout.local_ranks
    factors = np.zeros(_SHAPE)
    # Hop 1: a rank is its own node's owner of one row in L. Hop 2: an owner is the home in one node of N.
    hop1, hop2 = (local - 1) / local, (nodes - 1) / (nodes * local)
    for phase, size, rank, node in (
        (TrafficPhase.FORWARD_IDS, ID_BYTES, PER_RANK, PER_NODE),
        (TrafficPhase.FORWARD_ROWS, row_bytes, PER_RANK, PER_NODE),
        (TrafficPhase.BACKWARD_ROWS, row_bytes, BACK_PER_RANK, BACK_PER_NODE),
    ):
        factors[Tier.HOME, phase, INTRA, rank] = size * hop1
        factors[Tier.NODE, phase, INTRA, rank] = size * hop1
        factors[Tier.HOME, phase, INTER, node] = size * hop2
    factors[Tier.DEVICE, TrafficPhase.BACKWARD_ROWS, INTRA, BACK_PER_RANK] = row_bytes * hop1
    factors[Tier.DEVICE, TrafficPhase.SYNC_MASK, INTRA, SYNCED] = 2 * hop1 / 8
    factors[Tier.DEVICE, TrafficPhase.SYNC_SUMS, INTRA, ANYWHERE] = row_bytes * hop1
    for tier in (Tier.NODE, Tier.DEVICE):
        factors[tier, TrafficPhase.SYNC_MASK, INTER, SYNCED] = 2 * hop2 / 8
        if at_home:
            factors[tier, TrafficPhase.BACKWARD_ROWS, INTER, BACK_PER_NODE] = row_bytes * hop2
            factors[tier, TrafficPhase.SYNC_SUMS, INTER, ANYWHERE] = row_bytes * hop2
        else:
            # An all-reduce of s bytes over g ranks sends 2 (g-1)/g s a rank.
            factors[tier, TrafficPhase.SYNC_ROWS, INTER, ANYWHERE] = 2 * row_bytes * hop2
    return factors


def _direct_byte_factors(layout: RankLayout, row_bytes: int) -> Float64Array:
    """Return the factors of a direct exchange: every rank requests each row once from its home.

    NODE rows are requested from the node owner, so every rank must know them; DEVICE rows are held by the rank itself.
    NODE copies are synchronised by all-reduce; gradients of DEVICE rows are summed at their homes.
    """
    nodes, world, local = layout.nodes, layout.world_size, layout.local_ranks
    factors = np.zeros(_SHAPE)
    shares = {INTRA: (local - 1) / world, INTER: (world - local) / world}
    for phase, size, statistic in (
        (TrafficPhase.FORWARD_IDS, ID_BYTES, PER_RANK),
        (TrafficPhase.FORWARD_ROWS, row_bytes, PER_RANK),
        (TrafficPhase.BACKWARD_ROWS, row_bytes, BACK_PER_RANK),
    ):
        for link, share in shares.items():
            factors[Tier.HOME, phase, link, statistic] = size * share
        factors[Tier.NODE, phase, INTRA, statistic] = size * (local - 1) / local
    # An all-reduce of s bytes over g ranks sends 2 (g-1)/g s a rank.
    hop2 = (nodes - 1) / (nodes * local)
    factors[Tier.NODE, TrafficPhase.SYNC_MASK, INTER, SYNCED] = 2 * hop2 / 8
    factors[Tier.NODE, TrafficPhase.SYNC_ROWS, INTER, ANYWHERE] = 2 * hop2 * row_bytes
    for link, share in shares.items():
        factors[Tier.DEVICE, TrafficPhase.BACKWARD_ROWS, link, BACK_PER_RANK] = row_bytes * share
        factors[Tier.DEVICE, TrafficPhase.SYNC_MASK, link, SYNCED] = 2 * share / 8
        factors[Tier.DEVICE, TrafficPhase.SYNC_SUMS, link, ANYWHERE] = row_bytes * share
    return factors


def migration_bytes(layout: RankLayout, moved_bytes: int) -> Float64Array:
    """Return float64[tier]: bytes a rank sends to bring a row of ``moved_bytes`` to the tier, by all-gather from home.

    NODE: over the rail, one rail of L; DEVICE: over the world. Demotion to HOME moves nothing.
    """
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    return np.array([0.0, moved_bytes * (nodes - 1) / (nodes * local), moved_bytes * (world - 1) / world])


def exposed_share(exposed: Exposed) -> Float64Array:
    """Return float64[phase]: share of each phase that cannot run beside compute."""
    share = {
        TrafficPhase.FORWARD_IDS: exposed.forward,
        TrafficPhase.FORWARD_ROWS: exposed.forward,
        TrafficPhase.BACKWARD_ROWS: exposed.backward,
    }
    return np.array([share.get(phase, exposed.sync) for phase in TrafficPhase])


def linear_exposure(cluster: Cluster, seconds: Float64Array) -> Cluster:
    """Return the cluster with the exposure of a small change at float64[phase] seconds of communication.

    Where compute covers all that runs beside it, a byte counts by the phase's share; beyond, every byte counts whole.
    Exposed seconds are convex in the communication, so no change saves more than this says.
    """
    exposed = cluster.exposed
    if math.isinf(exposed.cover_seconds):
        return cluster
    covered = float((1.0 - exposed_share(exposed)) @ seconds) <= exposed.cover_seconds
    return cluster.with_exposed(replace(exposed, cover_seconds=math.inf) if covered else Exposed())


# All-to-alls over all ranks in a direct exchange: HOME rows, and the gradients and sums of DEVICE rows.
_OVER_THE_WORLD = (
    *((Tier.HOME, phase) for phase in EXCHANGE_PHASES),
    (Tier.DEVICE, TrafficPhase.BACKWARD_ROWS),
    (Tier.DEVICE, TrafficPhase.SYNC_SUMS),
)


def prices(
    sent: Float64Array, cluster: Cluster, micro_batches: int = 1, exchange: Exchange = Exchange.CHAIN
) -> Float64Array:
    """Return seconds per byte of each item of float64[3, 6, 2] bytes by (tier, phase, link), same shape.

    A message carries all tiers and dim-groups: of an exchange phase those of one micro-batch, of a synchronisation
    phase those of a step. Touched bits travel with ids and rows. All-to-alls of a direct exchange that leave the node
    are priced as those over all ranks, where the cluster has them.
    """
    result = np.zeros((len(Tier), len(TrafficPhase), len(Link)))
    for link, name in enumerate(Link):
        all_to_all = cluster.curve(name, Collective.ALL_TO_ALL)
        sizes = sent[:, :, link].sum(axis=0)
        for phase in EXCHANGE_PHASES:
            result[:, phase, link] = all_to_all.seconds_per_byte(float(sizes[phase]) / micro_batches)
        result[:, TrafficPhase.SYNC_MASK, link] = result[:, TrafficPhase.FORWARD_ROWS, link]
        result[:, TrafficPhase.SYNC_SUMS, link] = all_to_all.seconds_per_byte(float(sizes[TrafficPhase.SYNC_SUMS]))
        all_reduce = cluster.curve(name, Collective.ALL_REDUCE)
        result[:, TrafficPhase.SYNC_ROWS, link] = all_reduce.seconds_per_byte(float(sizes[TrafficPhase.SYNC_ROWS]))
    if exchange is not Exchange.CHAIN and cluster.world is not None:
        sizes = sent[:, :, INTER].sum(axis=0)
        for tier, phase in _OVER_THE_WORLD:
            size = float(sizes[phase]) / (micro_batches if phase in EXCHANGE_PHASES else 1)
            result[tier, phase, INTER] = cluster.world.all_to_all.seconds_per_byte(size)
        mask = result[Tier.HOME, TrafficPhase.FORWARD_ROWS, INTER]
        result[Tier.DEVICE, TrafficPhase.SYNC_MASK, INTER] = mask
    return result


def slower_link_only(seconds: Float64Array) -> Float64Array:
    """Return float64[3, 6, 2] with only the slower link left in each all-to-all over the world, which moves both
    links' bytes at the same time."""
    result = seconds.copy()
    for tier, phase in _OVER_THE_WORLD:
        faster = np.arange(len(Link)) != int(seconds[tier, phase].argmax())
        result[tier, phase, faster] = 0.0
    return result


def latencies(
    cluster: Cluster,
    layout: RankLayout,
    exchange: Exchange,
    replicated: Collection[int],
    *,
    micro_batches: int = 1,
    trained: bool = True,
    node_requests: bool = False,
    at_home: Collection[bool] = (False,),
) -> Float64Array:
    """Return float64[6, 2]: fixed seconds by (phase, link) of an optimizer step; dim-groups share the collectives.

    An exchange is three all-to-alls forward (sizes, ids, rows) in each micro-batch, and one backward in a step, on each
    hop that exists.

    Args:
        replicated: the tiers that hold trained rows: those above HOME are synchronised.
        trained: whether any table is: the gradients of all micro-batches travel once.
        node_requests: a direct exchange requests NODE rows from node owners in an all-to-all of its own.
        at_home: ``GroupLoad.sums_at_home`` of the dim-groups; decides between an all-reduce and an all-to-all of sums.
    """
    result = np.zeros((len(TrafficPhase), len(Link)))
    multi_node, multi_rank = layout.nodes > 1, layout.local_ranks > 1
    every_hop = [INTRA] * multi_rank + [INTER] * multi_node
    hops = every_hop if exchange is Exchange.CHAIN or node_requests else every_hop[-1:]
    all_to_all = [cluster.curve(name, Collective.ALL_TO_ALL).latency_seconds for name in Link]
    if exchange is not Exchange.CHAIN and cluster.world is not None:
        all_to_all[INTER] = cluster.world.all_to_all.latency_seconds
    for link in hops:
        result[TrafficPhase.FORWARD_IDS, link] = 2 * all_to_all[link] * micro_batches
        result[TrafficPhase.FORWARD_ROWS, link] = all_to_all[link] * micro_batches
        result[TrafficPhase.BACKWARD_ROWS, link] = all_to_all[link] * trained
    if not {Tier.NODE, Tier.DEVICE}.intersection(replicated):
        return result
    everywhere = Tier.DEVICE in replicated
    if exchange is Exchange.DIRECT_DEDUP:
        for link in every_hop[-1:] * everywhere:
            result[TrafficPhase.SYNC_SUMS, link] = all_to_all[link]
        all_reduces = multi_node and Tier.NODE in replicated
    else:
        all_reduces = multi_node and not all(at_home)
        if multi_node and any(at_home):
            result[TrafficPhase.SYNC_SUMS, INTER] = all_to_all[INTER]
        if everywhere and multi_rank:
            result[TrafficPhase.SYNC_SUMS, INTRA] = all_to_all[INTRA]
    if all_reduces:
        once = cluster.curve(Link.INTER_NODE, Collective.ALL_REDUCE).latency_seconds
        result[TrafficPhase.SYNC_ROWS, INTER] = once
    return result


FORGETTING = 0.9
"""Weight of everything learnt when another report arrives: about the newest ten reports count."""
MIN_REPORTS = 8
"""Reports before the probed prices are left."""
LARGEST_FACTOR = 8.0
"""Factors lie between its inverse and it."""
USE_BELOW = 0.8
"""A factor comes into use when its held-out error is below this share of that of the probed prices, and stays in use
while its error is the smaller one."""
LEAST_ERROR = 0.05
"""Prices whose held-out error is below this share of what was measured are right: no factor replaces them."""
MOST_ERROR = 0.5
"""Nor is a factor used whose held-out error is above this share of what was measured: what no factor explains (ranks
that wait for each other in turns) is no price."""
DEAD_BAND = 0.1
"""A factor in use stays until another differs by more than this share: plans made at prices that differ by noise would
move rows to and fro."""
# Weight of "the probed prices are right" in reports.
_SHRINKAGE = 0.3


@dataclass(frozen=True)
class PriceCorrection:
    """The correction of one link's prices by reports. Its size does not grow; ``learn`` returns the next one.

    Each report is predicted before it is learnt from, so that errors are held-out ones (prequential; Dawid 1984).

    Attributes:
        weight, ratios: forgotten number of reports, and sum of measured over predicted seconds.
        probed_error, corrected_error: forgotten absolute errors of the probed prices and with the learnt factor, as a
            share of what was measured in each report.
        reports: number of reports learnt from.
        used: whether the factor is in use.
        factor: in use; 1 if none is.
    """

    weight: float = 0.0
    ratios: float = 0.0
    probed_error: float = 0.0
    corrected_error: float = 0.0
    reports: int = 0
    used: bool = False
    factor: float = 1.0

    @property
    def fitted(self) -> float:
        """The factor that the reports show, shrunk towards 1."""
        shown = (_SHRINKAGE + self.ratios) / (_SHRINKAGE + self.weight)
        return min(LARGEST_FACTOR, max(1.0 / LARGEST_FACTOR, shown))

    def learn(self, predicted: float, measured: float) -> PriceCorrection:
        """Return the correction with one report more: seconds as the probed prices predict, and as measured. A report
        that is not finite and positive changes nothing."""
        if not (math.isfinite(predicted) and math.isfinite(measured) and predicted > 0 and measured > 0):
            return self
        # One stopped rank is no price.
        measured = min(measured, 2 * LARGEST_FACTOR * predicted)
        learnt = replace(
            self,
            weight=FORGETTING * self.weight + 1,
            ratios=FORGETTING * self.ratios + measured / predicted,
            probed_error=FORGETTING * self.probed_error + abs(measured - predicted) / measured,
            corrected_error=FORGETTING * self.corrected_error + abs(measured - self.fitted * predicted) / measured,
            reports=self.reports + 1,
        )
        used = learnt._predicts_better()
        fitted = learnt.fitted if used else 1.0
        moved = used is not self.used or abs(fitted / self.factor - 1) > DEAD_BAND
        return replace(learnt, used=used, factor=fitted if moved else self.factor)

    def error_shares(self) -> tuple[float, float]:
        """Return the held-out errors as probed and with the factor, as shares of what was measured; NaN before any
        report."""
        if not self.weight:
            return math.nan, math.nan
        return self.probed_error / self.weight, self.corrected_error / self.weight

    def reason(self) -> str:
        """Return in words why these prices are in use."""
        if self.reports < MIN_REPORTS:
            return f"as probed: {self.reports} of {MIN_REPORTS} reports"
        probed, corrected = self.error_shares()
        if not self.used:
            return f"as probed: held-out error {probed:.0%}, corrected {corrected:.0%}"
        return f"x{self.factor:.2f}: held-out error {corrected:.0%}, as probed {probed:.0%}"

    def _predicts_better(self) -> bool:
        probed, corrected = self.error_shares()
        if self.reports < MIN_REPORTS or corrected > MOST_ERROR:
            return False
        return corrected < probed and (self.used or (corrected < USE_BELOW * probed and probed > LEAST_ERROR))
