"""The training that ranks and reference have in common: tables, the next-item model and its loss."""

from __future__ import annotations

import torch
from torch import nn

import flexd
from flexd.demo.setup import DIM, HISTORY, RunSetup
from flexd.stream.batches import Batch, Batches
from flexd.stream.trace import load_trace

ADAGRAD_EPS = 1e-4
"""Row-wise Adagrad divides a row's first gradient by its own size; gradients that cancel to rounding noise would become
a full step. This eps keeps the noise small, so that runs can be compared."""


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


def batches_of(setup: RunSetup) -> Batches:
    return Batches(load_trace(setup.trace), setup.options.cluster.world_size, setup.options.batches)


def tables_of(setup: RunSetup, batches: Batches) -> list[flexd.EmbeddingTable]:
    trace = batches.trace
    return [
        flexd.EmbeddingTable(name, int(rows), DIM, dtype=setup.options.dtype, init_scale=DIM**-0.5)
        for name, rows in zip(trace.table_names, trace.table_rows, strict=True)
    ]


def dense_of(setup: RunSetup) -> nn.Module:
    torch.manual_seed(setup.options.seed)
    return NextItem(DIM, HISTORY).to(getattr(torch, setup.options.dtype))


def features_of(batch: Batch, names: tuple[str, ...]) -> dict[str, flexd.Jagged]:
    return {
        name: flexd.Jagged(torch.from_numpy(ids), torch.from_numpy(lengths))
        for name, ids, lengths in zip(names, batch.ids, batch.lengths, strict=True)
        if len(ids)
    }


def loss_of(model: nn.Module, batch: Batch, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss for each table's rows (in table order, tables without rows left out)."""
    lengths = torch.from_numpy(batch.sequence_lengths)
    sequences, mask = right_aligned(torch.cat(rows), torch.from_numpy(batch.order), lengths, HISTORY + 1)
    loss: torch.Tensor = model(sequences, mask)
    return loss
