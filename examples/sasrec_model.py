"""Shared parts of the example trainers: SASRec's dense part, and synthetic sequences with a learnable structure.

SASRec: Kang and McAuley, "Self-Attentive Sequential Recommendation" (arXiv 1808.09781).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

ITEMS, DIM, LENGTH = 2000, 32, 20
_FOLLOWERS = 4


def initial_items() -> torch.Tensor:
    """Return [ITEMS, DIM] initial item vectors, in the place of vectors trained on texts or images."""
    return torch.randn((ITEMS, DIM), generator=torch.Generator().manual_seed(1)) * 0.1


class SASRec(nn.Module):
    """Causal self-attention over item vectors, with scores of the next items."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.positions = nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, nhead=2, dim_feedforward=4 * DIM, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers=2)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the binary cross-entropy of next items against others (section III.E of the paper).

        Args:
            rows: [3 n, DIM] of the history, the next items and other items, in samples of ``lengths``.
        """
        history, following, others = rows.chunk(3)
        there = torch.arange(LENGTH, device=rows.device) < lengths.unsqueeze(1)
        padded = rows.new_zeros((len(lengths), LENGTH, DIM)).masked_scatter(there.unsqueeze(2), history)
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=rows.device)
        tower = self.blocks(padded + self.positions.weight, mask=causal, is_causal=True)[there]
        liked, disliked = (tower * following).sum(dim=1), (tower * others).sum(dim=1)
        return (functional.softplus(-liked) + functional.softplus(disliked)).mean()


def batches(rank: int, steps: int, samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids [3 n] of history, next items and other items, and lengths [samples], for every step.

    Each item has a few followers, one of which is next; popular items start sequences more often (Zipf).
    """
    followers = torch.randint(ITEMS, (ITEMS, _FOLLOWERS), generator=torch.Generator().manual_seed(3))
    popularity = 1.0 / torch.arange(1, ITEMS + 1)
    for step in range(steps):
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        lengths = torch.randint(2, LENGTH + 1, (samples,), generator=drawn)
        walk = [torch.multinomial(popularity, samples, replacement=True, generator=drawn)]
        for _ in range(LENGTH):
            walk.append(followers[walk[-1], torch.randint(_FOLLOWERS, (samples,), generator=drawn)])
        items = torch.stack(walk, dim=1)
        there = torch.arange(LENGTH) < lengths.unsqueeze(1)
        following = items[:, 1:][there]
        elsewhere = following[
            torch.randperm(len(following), generator=drawn)
        ]  # equally popular items at other positions
        yield torch.cat([items[:, :-1][there], following, elsewhere]), lengths
