"""Which bytes a row puts on which link at each tier: the one table that costs and the optimiser both use.

A traffic table is float64[tier, phase, link, statistic]: bytes per rank and step of one row at that tier, as factors
of its statistics (1, a, u, v, w) of ``workload``. Bytes are those a rank sends, averaged over the ranks (homes are
cyclic, so every rank is home and node owner of its share). Derivations: docs/cost-model.md.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from flexd.layout import RankLayout, Tier
from flexd.planner.workload import ACCESSES, ANYWHERE, PER_NODE, PER_RANK, ROWS, STATISTICS

Float64Array = npt.NDArray[np.float64]

ID_BYTES = 8
"""One requested key on one hop."""


class Phase(IntEnum):
    """The parts of a step's communication."""

    FORWARD_IDS = 0
    """Requests: keys on their way to the station that holds the row."""
    FORWARD_ROWS = 1
    """Row values on their way back."""
    BACKWARD_ROWS = 2
    """Gradients on their way to the home rank."""
    SYNC_MASK = 3
    """Which replicated rows were touched: one bit a row."""
    SYNC_ROWS = 4
    """Gradients of the touched replicated rows."""


class Where(IntEnum):
    """Link of a traffic table."""

    SELF = 0
    """Answered where it was asked: no traffic."""
    INTRA_NODE = 1
    INTER_NODE = 2


SHAPE = (len(Tier), len(Phase), len(Where), STATISTICS)


def chain_traffic(layout: RankLayout, row_bytes: int) -> Float64Array:
    """The chain self -> node owner -> home (DESIGN section 4), by tier."""
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    table = np.zeros(SHAPE)
    # Hop 1: a rank is its own node's owner of one row in L. Hop 2: an owner is the home in one node of N.
    hop1, hop2 = (local - 1) / local, (nodes - 1) / (nodes * local)
    exchanged = ((Phase.FORWARD_IDS, ID_BYTES), (Phase.FORWARD_ROWS, row_bytes), (Phase.BACKWARD_ROWS, row_bytes))
    for phase, size in exchanged:
        table[Tier.HOME, phase, Where.INTRA_NODE, PER_RANK] = size * hop1
        table[Tier.NODE, phase, Where.INTRA_NODE, PER_RANK] = size * hop1
        table[Tier.HOME, phase, Where.INTER_NODE, PER_NODE] = size * hop2
    table[Tier.HOME, Phase.FORWARD_ROWS, Where.SELF, PER_RANK] = row_bytes / world
    table[Tier.NODE, Phase.FORWARD_ROWS, Where.SELF, PER_RANK] = row_bytes / local
    table[Tier.DEVICE, Phase.FORWARD_ROWS, Where.SELF, PER_RANK] = row_bytes
    # An all-reduce of s bytes over g ranks sends 2 (g-1)/g s a rank; a reduce-scatter or all-gather half of that.
    table[Tier.NODE, Phase.SYNC_MASK, Where.INTER_NODE, ROWS] = 2 * hop2 / 8
    table[Tier.NODE, Phase.SYNC_ROWS, Where.INTER_NODE, ANYWHERE] = 2 * hop2 * row_bytes
    mask = 2 * (world - 1) / world / 8
    inter_share = 1 / local if nodes > 1 else 0.0
    table[Tier.DEVICE, Phase.SYNC_MASK, Where.INTER_NODE, ROWS] = mask * inter_share
    table[Tier.DEVICE, Phase.SYNC_MASK, Where.INTRA_NODE, ROWS] = mask * (1 - inter_share)
    table[Tier.DEVICE, Phase.SYNC_ROWS, Where.INTRA_NODE, ANYWHERE] = 2 * hop1 * row_bytes
    table[Tier.DEVICE, Phase.SYNC_ROWS, Where.INTER_NODE, ANYWHERE] = 2 * hop2 * row_bytes
    return table


def direct_traffic(layout: RankLayout, row_bytes: int, *, dedup: bool) -> Float64Array:
    """Every rank asks every home, as row-wise sharded modules do; with ``dedup`` for each row once. HOME rows only."""
    world, local = layout.world_size, layout.local_ranks
    table = np.zeros(SHAPE)
    statistic = PER_RANK if dedup else ACCESSES
    exchanged = ((Phase.FORWARD_IDS, ID_BYTES), (Phase.FORWARD_ROWS, row_bytes), (Phase.BACKWARD_ROWS, row_bytes))
    for phase, size in exchanged:
        table[Tier.HOME, phase, Where.INTRA_NODE, statistic] = size * (local - 1) / world
        table[Tier.HOME, phase, Where.INTER_NODE, statistic] = size * (world - local) / world
    table[Tier.HOME, Phase.FORWARD_ROWS, Where.SELF, statistic] = row_bytes / world
    return table


def migration_bytes(layout: RankLayout, moved_bytes: int) -> Float64Array:
    """float64[tier]: bytes a rank sends to bring one row of ``moved_bytes`` to the tier, by all-gather from its home.

    NODE: over the rail, one rail of L; DEVICE: over the world. HOME is reached by forgetting copies: 0.
    """
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    return np.array([0.0, moved_bytes * (nodes - 1) / (nodes * local), moved_bytes * (world - 1) / world])
