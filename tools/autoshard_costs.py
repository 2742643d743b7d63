"""AutoShard's cost model (Zha et al., KDD 2022, arXiv 2208.06399), for comparison: a network that represents each
table, the sum of the representations of a set, and a network from the sum to the cost of each phase.

Sizes are those of its published code. It is trained on logarithms of costs instead of costs, which suits the relative
errors that are compared here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from flexd.topology.kernel_file import TableSet

EPOCHS = 300
_HIDDEN, _REPRESENTATION, _HEAD = 128, 32, 64
_BATCH = 32


def table_features(tables: TableSet) -> np.ndarray:
    """float64[T, 8]: what the published model knows of a table (dim, rows, pooling factor, size, distribution)."""
    length = tables.ids / np.maximum(tables.bags, 1.0)
    positive = (tables.rows, tables.dim, tables.ids, tables.bags, length, tables.rows * tables.row_bytes)
    logs = [np.log1p(column) for column in positive]
    return np.stack([*logs, tables.skew, tables.distinct / np.maximum(tables.ids, 1.0)], axis=1)


class AutoShardCosts:
    """The trained model.

    Args:
        sets, seconds: measured sets and float64[n, phases].
    """

    def __init__(self, sets: Sequence[TableSet], seconds: np.ndarray, epochs: int = EPOCHS, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        every = np.concatenate([table_features(one) for one in sets])
        self._mean, self._spread = every.mean(axis=0), np.maximum(every.std(axis=0), 1e-6)
        self._table = nn.Sequential(
            nn.Linear(every.shape[1], _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _REPRESENTATION), nn.ReLU()
        )
        self._heads = nn.ModuleList(
            nn.Sequential(nn.Linear(_REPRESENTATION, _HEAD), nn.ReLU(), nn.Linear(_HEAD, 1))
            for _ in range(seconds.shape[1])
        )
        logs = np.log(seconds)
        self._centre, self._scale = logs.mean(axis=0), logs.std(axis=0)
        target = torch.tensor((logs - self._centre) / self._scale, dtype=torch.float32)
        features, place = self._inputs(sets)
        optimizer = torch.optim.Adam([*self._table.parameters(), *self._heads.parameters()], lr=1e-3)
        members = [torch.nonzero(place == at).view(-1) for at in range(len(sets))]
        for _ in range(epochs):
            for chosen in torch.randperm(len(sets), generator=generator).split(_BATCH):
                rows = torch.cat([members[at] for at in chosen.tolist()])
                sizes = torch.tensor([len(members[at]) for at in chosen.tolist()])
                local = torch.repeat_interleave(torch.arange(len(chosen)), sizes)
                loss = ((self._outputs(features[rows], local, len(chosen)) - target[chosen]) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def _inputs(self, sets: Sequence[TableSet]) -> tuple[torch.Tensor, torch.Tensor]:
        every = np.concatenate([(table_features(one) - self._mean) / self._spread for one in sets])
        place = np.repeat(np.arange(len(sets)), [len(one.rows) for one in sets])
        return torch.tensor(every, dtype=torch.float32), torch.from_numpy(place)

    def _outputs(self, features: torch.Tensor, place: torch.Tensor, sets: int) -> torch.Tensor:
        total = torch.zeros(sets, _REPRESENTATION).index_add_(0, place, self._table(features))
        return torch.cat([head(total) for head in self._heads], dim=1)

    def seconds(self, sets: Sequence[TableSet]) -> np.ndarray:
        """Return float64[n, phases] of sets."""
        with torch.no_grad():
            found = self._outputs(*self._inputs(sets), len(sets)).double().numpy()
        return np.exp(found * self._scale + self._centre)
