"""The training that ranks and reference have in common: tables, the next-item model and its loss; and the reference:
the same data in one plain process, with the bytes of row-wise sharding for the same batches.

An item is the sum of a trained row and the projection of a row of a read-only table, as of a model of its text or
image.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

import flexd
from flexd.core.keyspace import KeySpace
from flexd.core.placement import RankLayout
from flexd.demo.setup import CONTENT, CONTENT_DIM, DIM, HISTORY, LEARNING_RATE, RunSetup
from flexd.embedding.collection import EmbeddingCollection
from flexd.simulate.accesses import StepKeys, TouchCounter
from flexd.stream.batches import Batch, Batches
from flexd.stream.trace import load_trace

ADAGRAD_EPS = 1e-4
"""Row-wise Adagrad divides a row's first gradient by its own size; gradients that cancel to rounding noise would become
a full step. This eps keeps the noise small, so that runs can be compared."""


class NextItem(nn.Module):
    """Scores the last element of each sequence against the other samples' last elements."""

    def __init__(self, dim: int, content_dim: int, history: int) -> None:
        super().__init__()
        self.content = nn.Linear(content_dim, dim, bias=False)
        self.position = nn.Parameter(torch.zeros(history, dim))
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[batch, history + 1, dim + content_dim] right-aligned sequences and their bool mask -> scalar loss."""
        dim = self.content.out_features
        sequences = sequences[:, :, :dim] + self.content(sequences[:, :, dim:])
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


def batches_of(setup: RunSetup) -> Batches:
    return Batches(load_trace(setup.trace), setup.options.cluster.world_size, setup.options.batches.options())


def tables_of(setup: RunSetup, batches: Batches) -> list[flexd.EmbeddingTable]:
    trace = batches.trace
    return [
        flexd.EmbeddingTable(f"{name}{suffix}", int(rows), dim, dtype=dtype, init_scale=dim**-0.5, trainable=not suffix)
        for suffix, dim, dtype in setup.options.kinds
        for name, rows in zip(trace.table_names, trace.table_rows, strict=True)
    ]


def dense_of(setup: RunSetup) -> nn.Module:
    torch.manual_seed(setup.options.seed)
    return NextItem(DIM, CONTENT_DIM, HISTORY).to(getattr(torch, setup.options.dtype))


def features_of(batch: Batch, names: tuple[str, ...]) -> dict[str, flexd.Jagged]:
    """Return the ids by table; those of a trained table also for that of their content."""
    return {
        f"{name}{suffix}": flexd.Jagged(torch.from_numpy(ids), torch.from_numpy(lengths))
        for suffix in ("", CONTENT)
        for name, ids, lengths in zip(names, batch.ids, batch.lengths, strict=True)
        if len(ids)
    }


def loss_of(model: nn.Module, batch: Batch, rows: dict[str, torch.Tensor], names: tuple[str, ...]) -> torch.Tensor:
    """Return the loss for the rows by table.

    Args:
        names: of the trained tables, in order; those without rows are left out.
    """
    looked_up = [name for name in names if name in rows]
    items = [torch.cat([rows[name], rows[f"{name}{CONTENT}"].to(rows[name].dtype)], 1) for name in looked_up]
    lengths = torch.from_numpy(batch.sequence_lengths)
    sequences, mask = right_aligned(torch.cat(items), torch.from_numpy(batch.order), lengths, HISTORY + 1)
    loss: torch.Tensor = model(sequences, mask)
    return loss


ID_BYTES = 8


def row_wise_bytes(keyspace: KeySpace, layout: RankLayout, batch: Batch, rank: int, *, dedup: bool) -> int:
    """Return the inter-node bytes of a pass if the rank requested every row from its home, and pushed its gradient:
    those of id, row and gradient for every (distinct) id whose home is in another node. Content has no gradient."""
    total = 0
    for table, spec in enumerate(keyspace.tables):
        ids = batch.ids[table % len(batch.ids)]
        keys = keyspace.keys(table, np.unique(ids) if dedup else ids)
        far = int((layout.home_node(keys) != layout.node_of(rank)).sum())
        total += far * (ID_BYTES + (1 if spec.name in keyspace.read_only else 2) * spec.row_bytes)
    return total


class PlainTraining:
    """``nn.Embedding`` tables and row-wise Adagrad on all ranks' batches, in one process."""

    def __init__(self, setup: RunSetup, batches: Batches) -> None:
        self._batches = batches
        specs = tables_of(setup, batches)
        start = EmbeddingCollection(specs, layout=RankLayout(1, 1), seed=setup.options.seed)
        self.keyspace = start.keyspace
        self.tables = {
            spec.name: nn.Embedding(spec.rows, spec.dim, _weight=start.initial_table(spec.name)).requires_grad_(
                spec.trainable
            )
            for spec in specs
        }
        self._sums = {spec.name: torch.zeros(spec.rows, 1, dtype=self.tables[spec.name].weight.dtype) for spec in specs}
        self.dense = dense_of(setup)
        self._dense_optimizer = torch.optim.SGD(self.dense.parameters(), lr=LEARNING_RATE)

    def step(self, batches: list[list[Batch]]) -> list[float]:
        """Do one step over the batches of each rank; return the losses by rank."""
        losses = []
        self._dense_optimizer.zero_grad()
        for of_rank in batches:
            total = 0.0
            for batch in of_rank:
                features = features_of(batch, self._batches.trace.table_names)
                rows = {name: table(features[name].values) for name, table in self.tables.items() if name in features}
                loss = loss_of(self.dense, batch, rows, self._batches.trace.table_names) / len(of_rank)
                (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            losses.append(total)
        self._dense_optimizer.step()
        with torch.no_grad():
            for name, table in self.tables.items():
                grad = table.weight.grad
                if grad is None:
                    continue
                sums = self._sums[name].add_(grad.square().mean(dim=1, keepdim=True))
                table.weight.sub_(LEARNING_RATE * grad / (sums.sqrt() + ADAGRAD_EPS))
                table.weight.grad = None
        return losses


def train_reference(setup: RunSetup) -> dict[str, Any]:
    """Train all steps in one plain process; return the record, by name."""
    torch.set_num_threads(1)
    batches = batches_of(setup)
    training = PlainTraining(setup, batches)
    cluster, keyspace = setup.options.cluster, training.keyspace
    layout = RankLayout(cluster.nodes, cluster.local_ranks)
    ranks, passes = range(layout.world_size), range(batches.options.micro_batches)
    losses, touches = [], TouchCounter(layout)
    counted: dict[str, list[int]] = {"row_wise": [], "row_wise_dedup": []}
    for step in range(setup.steps):
        of_ranks = [[batches.batch(step, rank, micro_batch) for micro_batch in passes] for rank in ranks]
        losses.append(training.step(of_ranks))
        for micro_batch in passes:
            keys = [
                np.concatenate([keyspace.keys(table, ids) for table, ids in enumerate(of_rank[micro_batch].ids)])
                for of_rank in of_ranks
            ]
            touches.see(StepKeys.of(keys, layout))
        for name, sent in counted.items():
            sent.append(
                sum(
                    row_wise_bytes(keyspace, layout, batch, rank, dedup=name == "row_wise_dedup")
                    for rank in ranks
                    for batch in of_ranks[rank]
                )
            )
    return {
        "loss": np.array(losses),
        **{name: np.array(sent) for name, sent in counted.items()},
        "samples": np.array(batches.describe()),
        **{f"touches/{name}": np.array(value) for name, value in touches.figures().items() if value is not None},
        **{f"table/{name}": table.weight.detach().numpy() for name, table in training.tables.items()},
        **{f"dense/{name}": value.numpy() for name, value in training.dense.state_dict().items()},
    }
