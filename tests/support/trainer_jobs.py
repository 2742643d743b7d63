"""Jobs of ranks: a model of ``nn.Embedding`` modules in a usual trainer, plain on one process and with flexd."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

ITEMS, USERS, DIM, SAMPLES, LENGTH, STEPS = 41, 17, 6, 5, 7, 6


@dataclass(frozen=True)
class Batch:
    """int64 [samples, length] with padding 0, and [samples]."""

    history: torch.Tensor
    users: torch.Tensor
    liked: torch.Tensor
    other: torch.Tensor


def batch(step: int, rank: int) -> Batch:
    rng = np.random.default_rng([11, step, rank])
    history = rng.integers(1, ITEMS, (SAMPLES, LENGTH))
    history[np.arange(LENGTH) < rng.integers(0, LENGTH, (SAMPLES, 1))] = 0
    pairs = rng.integers(1, ITEMS, (2, SAMPLES))
    return Batch(*map(torch.from_numpy, (history, rng.integers(0, USERS, SAMPLES), pairs[0], pairs[1])))


class Recommender(nn.Module):
    """Items (with padding), users and a dense layer. All values are drawn, that of the padding row too."""

    def __init__(self, softmax: bool, seed: int = 3) -> None:
        super().__init__()
        self.softmax = softmax
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=0, dtype=torch.float64)
        self.users = nn.ModuleDict({"embedding": nn.Embedding(USERS, DIM, dtype=torch.float64)})
        self.dense = nn.Linear(DIM, DIM, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)

    def forward(self, given: Batch) -> torch.Tensor:
        state = self.state(given)
        if self.softmax:
            return functional.cross_entropy(state @ self.items.weight.T, given.liked)
        scores = ((self.items(given.liked) - self.items(given.other)) * state).sum(1)
        return -functional.logsigmoid(scores).mean()

    def state(self, given: Batch) -> torch.Tensor:
        users: torch.Tensor = self.users["embedding"](given.users)
        return torch.tanh(self.dense(self.items(given.history).mean(1) + users))

    def scores(self, given: Batch) -> torch.Tensor:
        """Return [samples, items] as a framework does that ranks all items."""
        return self.state(given) @ self.items.weight.T
