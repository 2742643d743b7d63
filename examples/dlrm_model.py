"""Shared parts of the TorchRec trainers: a DLRM with pooled and sequence features, and synthetic clicks.

DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (arXiv
1906.00091). Clicks depend on the user, the shops of the session and the item's place in the user's history.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torchrec
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DenseArch, InteractionArch, SparseArch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS = {"user": 4000, "shops": 300, "history": 2000, "item": 2000}
DIM, DENSE = 16, 4


class Ranker(nn.Module):
    """DLRM on pooled features, with the attention of the item to the user's history beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        of_features = [("user", ROWS["user"], ["user"]), ("shop", ROWS["shops"], ["shops"])]
        self.sparse = SparseArch(
            torchrec.EmbeddingBagCollection(
                tables=[
                    torchrec.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=keys)
                    for name, rows, keys in of_features
                ]
            )
        )
        self.items = torchrec.EmbeddingCollection(
            tables=[
                torchrec.EmbeddingConfig(
                    name="item", num_embeddings=ROWS["item"], embedding_dim=DIM, feature_names=["history", "item"]
                )
            ]
        )
        self.dense = DenseArch(DENSE, [32, DIM])
        self.interaction = InteractionArch(len(of_features))
        self.over = nn.Sequential(nn.Linear(DIM + 3 + 2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def tables(self) -> list[nn.Parameter]:
        return [*self.sparse.parameters(), *self.items.parameters()]

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and the scores [samples]."""
        crossed = self.interaction(self.dense(batch.dense_features), self.sparse(batch.sparse_features))
        rows = self.items(batch.sparse_features)
        item, history = rows["item"].values(), rows["history"]
        lengths = history.lengths()
        of_samples = torch.repeat_interleave(item, lengths, dim=0)
        weighted = history.values() * (history.values() * of_samples).sum(dim=1, keepdim=True).sigmoid()
        attended = torch.segment_reduce(weighted, "sum", lengths=lengths)
        scores = self.over(torch.cat([crossed, item, attended], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.labels), scores


def batches(rank: int, steps: range, samples: int) -> Iterator[Batch]:
    """Yield the samples of a rank for every step, popular rows more often (Zipf)."""
    taste = torch.randn(ROWS["user"], generator=torch.Generator().manual_seed(2))
    appeal = torch.randn(ROWS["item"], generator=torch.Generator().manual_seed(3))
    for step in steps:
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        lengths = {
            "user": torch.ones(samples, dtype=torch.int64),
            "shops": torch.randint(0, 4, (samples,), generator=drawn),
            "history": torch.randint(0, 12, (samples,), generator=drawn),
            "item": torch.ones(samples, dtype=torch.int64),
        }
        ids = {
            key: torch.multinomial(
                1.0 / torch.arange(1, ROWS[key] + 1), int(counts.sum()), replacement=True, generator=drawn
            )
            for key, counts in lengths.items()
        }
        dense = torch.randn(samples, DENSE, generator=drawn)
        liking = 2 * taste[ids["user"]] * appeal[ids["item"]] + dense[:, 0]
        labels = torch.bernoulli(liking.sigmoid(), generator=drawn)
        yield Batch(
            dense,
            KeyedJaggedTensor.from_lengths_sync(
                list(ROWS), torch.cat(list(ids.values())), torch.cat(list(lengths.values()))
            ),
            labels,
        )
