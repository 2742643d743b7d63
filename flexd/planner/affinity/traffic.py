"""Rows that cross between nodes and samples shipped, with homes by rule and with homes and dealing by affinity."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout
from flexd.planner.affinity.dealing import deal
from flexd.planner.affinity.partition import FROM_HOMES, AffinityLimits, NodeHomes, learn_homes
from flexd.planner.affinity.sample_rows import SampleRows, sorted_distinct

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

MIN_SAVING = 0.02
"""Share of the chain's bytes between nodes below which affinity does not pay."""
_PROBABILITIES = (None, 0.5, FROM_HOMES)
_MIN_BATCHES = 4
_JUDGED = 0.25
"""Share of a window's batches that judge the homes learnt from the others."""


@dataclass(frozen=True)
class WireBytes:
    """Bytes that cross between nodes.

    Attributes:
        row: of a row that crosses in a step: its values, its gradient, its id each way.
        sample_id: of one id of a shipped sample.
        sample: of a shipped sample beside its ids: dense features, label, lengths.
    """

    row: float
    sample_id: float = 4.0
    sample: float = 64.0


@dataclass(frozen=True)
class AffinityTraffic:
    """Bytes between nodes of the same global batches. Shipped samples are those trained in another node than read.

    Attributes:
        batches: global batches.
        chain_rows: rows that cross with homes by rule, samples trained where they are read.
        loader_rows: with homes and dealing by affinity, the global batch dealt by the loader: nothing is shipped.
        rows: the same, each rank dealing its own samples, in equal numbers to every node.
        shipped_samples: by the ranks.
        shipped_bytes: by the ranks.
        wire: the bytes counted.
    """

    batches: int
    chain_rows: float
    loader_rows: float
    rows: float
    shipped_samples: int
    shipped_bytes: float
    wire: WireBytes

    @property
    def rows_ratio(self) -> float:
        """Rows that cross over the chain's, dealt by the ranks."""
        return self.rows / max(1, self.chain_rows)

    @property
    def bytes_ratio(self) -> float:
        """Bytes over the chain's, with shipped samples, dealt by the ranks."""
        return (self.rows * self.wire.row + self.shipped_bytes) / max(1.0, self.chain_rows * self.wire.row)

    @property
    def loader_ratio(self) -> float:
        """Rows, and so bytes, over the chain's, dealt by the loader."""
        return self.loader_rows / max(1, self.chain_rows)


def rule_nodes(keys: Int64Array, layout: RankLayout) -> Int64Array:
    """Return int64 [n]: the node of each key's home rank by the rule ``key % world_size``."""
    nodes: Int64Array = keys % layout.world_size // layout.local_ranks
    return nodes


def crossing_rows(
    samples: SampleRows,
    batch: Int64Array,
    to: Int64Array,
    home: Int64Array,
    nodes: int,
    weight: Float32Array | None = None,
) -> float:
    """Return the rows that cross: of each batch, the distinct rows of each node that are not at home there.

    Args:
        batch: int64 [samples], the global batch of each sample.
        to: int64 [samples], the node that trains it.
        home: int64 [rows], the node of the home of each of ``samples.keys``.
        weight: float32 [rows], of a row that crosses; None: 1.
    """
    share = (batch * nodes + to)[samples.samples]
    row = sorted_distinct(share * np.int64(len(samples.keys)) + samples.rows)
    share, row = np.divmod(row, len(samples.keys))
    away = home[row] != share % nodes
    return float(np.count_nonzero(away) if weight is None else weight[row[away]].sum(dtype=np.float64))


def traffic(
    samples: SampleRows,
    batch: Int64Array,
    homes: NodeHomes,
    layout: RankLayout,
    wire: WireBytes,
    weight: Float32Array | None = None,
) -> AffinityTraffic:
    """Return what crosses between nodes in these batches, counted; rows by their weights.

    Samples of a batch are read by the ranks in turn. Dealing knows the rows of a sample and what was learnt of them,
    not the rest of the batch.
    """
    nodes = layout.nodes
    by_rule = rule_nodes(samples.keys, layout)
    reader = _position_in_batch(batch) % layout.world_size
    read_in = reader // layout.local_ranks
    home = homes.home_of(samples.keys, by_rule)
    row_costs = homes.row_costs(samples.keys, by_rule)
    if weight is not None:
        row_costs = row_costs * weight[:, None]
    costs = np.asarray(samples.matrix() @ row_costs, dtype=np.float32)
    by_loader = deal(costs, batch)
    ship = (wire.sample_id * samples.lengths + wire.sample) / wire.row
    away = np.arange(nodes)[None, :] != read_in[:, None]
    by_ranks = deal((costs + ship[:, None] * away).astype(np.float32), batch * layout.world_size + reader)
    shipped = by_ranks != read_in
    return AffinityTraffic(
        batches=len(np.unique(batch)),
        chain_rows=crossing_rows(samples, batch, read_in, by_rule, nodes, weight),
        loader_rows=crossing_rows(samples, batch, by_loader, home, nodes, weight),
        rows=crossing_rows(samples, batch, by_ranks, home, nodes, weight),
        shipped_samples=int(np.count_nonzero(shipped)),
        shipped_bytes=float(ship[shipped].sum() * wire.row),
        wire=wire,
    )


@dataclass(frozen=True)
class AffinityChoice:
    """Homes for the batches to come, and what they are expected to send.

    Attributes:
        homes: learnt from the whole window.
        expected: of the window's last quarter, by homes learnt from the batches before it; None of too few batches.
        probability: of the bisection, that was best there; None: one over the number of batches.
    """

    homes: NodeHomes
    expected: AffinityTraffic | None
    probability: float | None

    def pays(self, *, loader_deals: bool = False, min_saving: float = MIN_SAVING) -> bool:
        """Return whether at least a share of the chain's bytes is saved; False means "not here"."""
        if self.expected is None or not self.expected.chain_rows:
            return False
        ratio = self.expected.loader_ratio if loader_deals else self.expected.bytes_ratio
        return ratio <= 1 - min_saving


def choose_affinity(
    window: SampleRows, batch: Int64Array, layout: RankLayout, wire: WireBytes, limits: AffinityLimits | None = None
) -> AffinityChoice:
    """Return homes learnt from a window, by the way of learning that is best for its last quarter.

    Args:
        batch: int64 [samples], from 0, the global batch of each sample, in order of time.
    """
    limits = limits or AffinityLimits()
    by_rule = rule_nodes(window.keys, layout)
    expected, probability = None, None
    batches = int(batch.max(initial=-1)) + 1
    if batches >= _MIN_BATCHES:
        first = batches - max(1, int(_JUDGED * batches))
        learnt, judged = np.flatnonzero(batch < first), np.flatnonzero(batch >= first)
        known, after = window.select(learnt).compact(), window.select(judged).compact()
        rule = rule_nodes(known.keys, layout)
        for each in _PROBABILITIES:
            homes = learn_homes(known, batch[learnt], rule, layout.nodes, replace(limits, probability=each))
            sent = traffic(after, batch[judged] - first, homes, layout, wire)
            if expected is None or sent.rows < expected.rows:
                expected, probability = sent, each
    homes = learn_homes(window, batch, by_rule, layout.nodes, replace(limits, probability=probability))
    return AffinityChoice(homes, expected, probability)


def _position_in_batch(batch: Int64Array) -> Int64Array:
    order = np.argsort(batch, kind="stable")
    starts = np.cumsum(np.bincount(batch)) - np.bincount(batch)
    position = np.empty(len(batch), dtype=np.int64)
    position[order] = np.arange(len(batch)) - starts[batch[order]]
    return position
