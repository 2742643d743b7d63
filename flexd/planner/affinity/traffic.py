"""Rows that cross between nodes, with homes by rule and with homes by affinity and samples dealt by the loader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout
from flexd.planner.affinity.dealing import deal
from flexd.planner.affinity.partition import NodeHomes
from flexd.planner.affinity.sample_rows import SampleRows, sorted_distinct

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

MIN_SAVING = 0.02
"""Share of the chain's bytes between nodes below which affinity does not pay."""


@dataclass(frozen=True)
class AffinityTraffic:
    """Rows between nodes of the same global batches.

    Attributes:
        batches: global batches.
        chain_rows: rows that cross with homes by rule, samples trained where they are read.
        loader_rows: with homes and dealing by affinity, the global batch dealt by the loader.
        row_bytes: that cross for a row in a step: its values, its gradient, its id each way.
    """

    batches: int
    chain_rows: float
    loader_rows: float
    row_bytes: float

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
    row_bytes: float,
    weight: Float32Array | None = None,
) -> AffinityTraffic:
    """Return what crosses between nodes in these batches, counted; rows by their weights.

    Samples of a batch are read by the ranks in turn. Dealing knows the rows of a sample and what was learnt of them,
    not the rest of the batch.
    """
    nodes = layout.nodes
    by_rule = rule_nodes(samples.keys, layout)
    read_in = _position_in_batch(batch) % layout.world_size // layout.local_ranks
    home = homes.home_of(samples.keys, by_rule)
    row_costs = homes.row_costs(samples.keys, by_rule)
    if weight is not None:
        row_costs = row_costs * weight[:, None]
    by_loader = deal(np.asarray(samples.matrix() @ row_costs, dtype=np.float32), batch)
    return AffinityTraffic(
        batches=len(np.unique(batch)),
        chain_rows=crossing_rows(samples, batch, read_in, by_rule, nodes, weight),
        loader_rows=crossing_rows(samples, batch, by_loader, home, nodes, weight),
        row_bytes=row_bytes,
    )


def _position_in_batch(batch: Int64Array) -> Int64Array:
    order = np.argsort(batch, kind="stable")
    starts = np.cumsum(np.bincount(batch)) - np.bincount(batch)
    position = np.empty(len(batch), dtype=np.int64)
    position[order] = np.arange(len(batch)) - starts[batch[order]]
    return position
