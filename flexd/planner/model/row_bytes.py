"""Bytes of a row on each link at each tier: the factors that both the costs and the optimiser use.

Byte factors are float64[tier, phase, link, statistic]: bytes per rank and optimizer step of one row at that tier, as
factors of its statistics (``workload``). Bytes are those a rank sends, averaged over the ranks. Derivations:
docs/cost-model.md.
"""

from __future__ import annotations

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
from flexd.topology.cluster import INTER, INTRA, Link

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
