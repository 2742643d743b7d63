"""The models of the demo: a next-item model over sequences of rows, and one over sums of bags with planned tables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

import flexd
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.planner.tables.sharding import TableStatistics, plan_rules
from flexd.planner.tables.table_list import ListedTable
from flexd.simulate.exact_profile import exact_profile
from flexd.stream.batches import Batch, Batches
from flexd.topology.cluster import Cluster


class NextItem(nn.Module):
    """Scores the last element of each sequence against the other samples' last elements."""

    def __init__(self, dim: int, history: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(history, dim))
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[batch, history + 1, dim] right-aligned sequences and their bool mask -> scalar loss."""
        context, target = sequences[:, :-1], sequences[:, -1]
        seen = mask[:, :-1]
        x = context + self.position
        # Only the newest state predicts, so one query a sample is enough.
        scores = (self.query(x[:, -1:]) @ self.key(x).transpose(1, 2)).squeeze(1) * x.shape[-1] ** -0.5
        attention = scores.masked_fill(~seen, float("-inf")).softmax(dim=1)
        state = x[:, -1] + (attention.unsqueeze(1) @ self.value(x)).squeeze(1)
        state = state + self.feed_forward(self.norm(state))
        logits = state @ target.transpose(0, 1)
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


def right_aligned(
    rows: torch.Tensor, order: torch.Tensor, lengths: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[elements, dim] rows, taken in ``order``, sequence by sequence -> ([batch, width, dim], bool [batch, width])."""
    ends = lengths.cumsum(0)
    column = torch.arange(width)
    back = width - 1 - column
    mask = back.unsqueeze(0) < lengths.unsqueeze(1)
    element = torch.where(mask, ends.unsqueeze(1) - 1 - back.unsqueeze(0), 0)
    sequences = rows[order][element] * mask.unsqueeze(2)
    return sequences, mask


CLASSES = 64
"""Rows fall into so many classes; the model predicts that of a sample's newest event."""
PROFILE_STEPS = 20
"""Steps, spread evenly over the run, in which the look-ups are counted before the start."""
MEMORY_BYTES = 40e9
"""Of a rank: no table of a demo is near it."""


class PooledClassifier(nn.Module):
    """Predicts the class of a sample's newest event from the sums of all tables' bags."""

    def __init__(self, dim: int, tables: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim * tables)
        self.layers = nn.Sequential(nn.Linear(dim * tables, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, CLASSES))

    def forward(self, pooled: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[batch, tables * dim] sums and int64 [batch] classes -> scalar loss."""
        return nn.functional.cross_entropy(self.layers(self.norm(pooled)), labels)


def bags_of(batch: Batch, names: tuple[str, ...]) -> tuple[dict[str, flexd.Jagged], torch.Tensor]:
    """Return of each table the bags of all events but a sample's newest, and int64 [samples] classes of the newest."""
    sizes = np.array([len(ids) for ids in batch.ids])
    ends = np.cumsum(sizes)
    newest = batch.order[np.cumsum(batch.sequence_lengths) - 1]
    table = np.searchsorted(ends, newest, side="right")
    labels = (np.concatenate(batch.ids)[newest] + table) % CLASSES
    kept = np.ones(ends[-1], bool)
    kept[newest] = False
    features = {}
    for at, name in enumerate(names):
        ids = batch.ids[at][kept[ends[at] - sizes[at] : ends[at]]]
        features[name] = flexd.Jagged(torch.from_numpy(ids), torch.from_numpy(batch.lengths[at] - (table == at)))
    return features, torch.from_numpy(labels)


def pooled_loss(
    model: nn.Module, pooled: Mapping[str, torch.Tensor], names: tuple[str, ...], labels: torch.Tensor
) -> torch.Tensor:
    """Return the loss for [batch, dim] sums by table."""
    loss: torch.Tensor = model(torch.cat([pooled[name] for name in names], dim=1), labels)
    return loss


def choose_rules(
    batches: Batches, layout: RankLayout, cluster: Cluster, dim: int, dtype: str
) -> dict[str, tuple[str, str]]:
    """Return (home rule, answer) of each table, as ``flexd shard --for flexd`` plans them from the trace's look-ups."""
    trace = batches.trace
    names = trace.table_names
    rows = [int(count) for count in trace.table_rows]
    keyspace = KeySpace(
        [TableSpec(name, count, dim, dtype, "rowwise_adagrad") for name, count in zip(names, rows, strict=True)]
    )
    steps = np.unique(np.linspace(0, batches.steps - 1, PROFILE_STEPS).astype(int)).tolist()
    looked_up = np.zeros(len(names))
    passes = []
    for step in steps:
        of_ranks = []
        for rank in range(layout.world_size):
            features, _ = bags_of(batches.batch(step, rank), names)
            ids = [features[name].values.numpy() for name in names]
            looked_up += [len(of_table) for of_table in ids]
            of_ranks.append(np.concatenate([keyspace.keys(at, of_table) for at, of_table in enumerate(ids)]))
        passes.append(of_ranks)
    per_sample = looked_up / (len(steps) * layout.world_size * batches.batch_size)
    listed = [
        ListedTable(name, count, dim, float(lookups), 1.0, batches.batch_size, dtype=dtype)
        for name, count, lookups in zip(names, rows, per_sample, strict=True)
    ]
    statistics = TableStatistics(profile=exact_profile(passes, keyspace, layout), dtype=dtype)
    plan = plan_rules(listed, layout, cluster, MEMORY_BYTES, statistics)
    return {name: (rule, answer or "rows") for name, (rule, answer) in zip(names, plan.chosen, strict=True)}


def reduce_scatter_bytes(ids: int, batch_size: int, tables: int, row_bytes: int, layout: RankLayout) -> float:
    """Return the bytes of a pass that TorchRec's row-wise sharding sends between nodes, over the whole job.

    Ids (8 bytes each, not deduplicated) travel to homes spread evenly; sums come by reduce-scatter and gradients go by
    all-gather over all ranks, each a ring with one way out of each node, the least that they can send.

    Args:
        ids: looked up by all ranks.
        batch_size: bags of a rank and table.
        row_bytes: of one vector.
    """
    if layout.nodes == 1:
        return 0.0
    far = (layout.nodes - 1) / layout.nodes
    ring = layout.nodes * (layout.world_size - 1) * batch_size * tables * row_bytes
    return 8 * ids * far + 2 * ring
