"""Train the same data in one plain process, and count the bytes of row-wise sharding for the same batches.

``python -m flexd.demo.reference SETUP.json`` writes ``reference.npz`` beside the ranks' records.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.demo.rank import ADAGRAD_EPS, RunSetup, features_of, loss_of
from flexd.embedding.collection import EmbeddingCollection
from flexd.simulate.step_keys import StepKeys, TouchCounter
from flexd.stream.batches import Batch, Batches

ID_BYTES = 8
Int64Array = npt.NDArray[np.int64]


class RowWiseBaseline:
    """Inter-node bytes of a pass if every rank requested every row from its home, and pushed its gradient, counted
    from the id sets."""

    def __init__(self, keyspace: KeySpace, layout: RankLayout) -> None:
        self._keyspace = keyspace
        self._layout = layout

    def keys_of(self, batch: Batch) -> Int64Array:
        return np.concatenate([self._keyspace.keys(table, ids) for table, ids in enumerate(batch.ids)])

    def bytes_of(self, batch: Batch, rank: int, *, dedup: bool) -> int:
        """Return the bytes of id, row and gradient for every (distinct) id whose home is in another node."""
        total = 0
        for table, ids in enumerate(batch.ids):
            keys = self._keyspace.keys(table, np.unique(ids) if dedup else ids)
            far = int((self._layout.home_node(keys) != self._layout.node_of(rank)).sum())
            total += far * (ID_BYTES + 2 * self._keyspace.tables[table].row_bytes)
        return total


class PlainTraining:
    """``nn.Embedding`` tables and row-wise Adagrad on all ranks' batches, in one process."""

    def __init__(self, setup: RunSetup, batches: Batches) -> None:
        self._setup = setup
        self._batches = batches
        specs = setup.tables(batches)
        start = EmbeddingCollection(specs, layout=RankLayout(1, 1), seed=setup.seed)
        self.keyspace = start.keyspace
        self.names = batches.trace.table_names
        self.tables = {
            spec.name: nn.Embedding(spec.rows, spec.dim, _weight=start.initial_table(spec.name)) for spec in specs
        }
        self._sums = {spec.name: torch.zeros(spec.rows, 1, dtype=self.tables[spec.name].weight.dtype) for spec in specs}
        self.dense = setup.dense()
        self._dense_optimizer = torch.optim.SGD(self.dense.parameters(), lr=setup.dense_learning_rate)

    def step(self, step: int) -> list[float]:
        """Do one step over all ranks' batches; return the losses by rank."""
        setup, losses = self._setup, []
        self._dense_optimizer.zero_grad()
        for rank in range(setup.world_size):
            of_rank = []
            for micro_batch in range(setup.micro_batches):
                batch = self._batches.batch(step, rank, micro_batch)
                loss = self._loss(batch)
                (loss / setup.world_size / setup.micro_batches).backward()  # type: ignore[no-untyped-call]
                of_rank.append(loss.item())
            losses.append(sum(of_rank) / setup.micro_batches)
        self._dense_optimizer.step()
        with torch.no_grad():
            for name, table in self.tables.items():
                grad = table.weight.grad
                if grad is None:
                    continue
                sums = self._sums[name].add_(grad.square().mean(dim=1, keepdim=True))
                table.weight.sub_(setup.learning_rate * grad / (sums.sqrt() + ADAGRAD_EPS))
                table.weight.grad = None
        return losses

    def _loss(self, batch: Batch) -> torch.Tensor:
        features = features_of(batch, self.names)
        rows = [self.tables[name](features[name].values) for name in self.names if name in features]
        return loss_of(self.dense, batch, rows, self._setup.history)


def run(setup: RunSetup) -> dict[str, Any]:
    batches = setup.batches()
    training = PlainTraining(setup, batches)
    layout = RankLayout(setup.nodes, setup.local_ranks)
    baseline = RowWiseBaseline(training.keyspace, layout)
    losses, row_wise, row_wise_dedup, touches = [], [], [], TouchCounter(layout)
    for step in range(setup.steps):
        losses.append(training.step(step))
        counted = [0, 0]
        for micro_batch in range(setup.micro_batches):
            shards = [(batches.batch(step, rank, micro_batch), rank) for rank in range(setup.world_size)]
            touches.see(StepKeys.of([baseline.keys_of(batch) for batch, _ in shards], layout))
            for dedup in (False, True):
                counted[dedup] += sum(baseline.bytes_of(batch, rank, dedup=dedup) for batch, rank in shards)
        row_wise.append(counted[False])
        row_wise_dedup.append(counted[True])
    return {
        "loss": np.array(losses),
        "row_wise": np.array(row_wise),
        "row_wise_dedup": np.array(row_wise_dedup),
        "samples": np.array(batches.describe()),
        **{f"touches/{name}": np.array(value) for name, value in touches.figures().items() if value is not None},
        **{f"table/{name}": table.weight.detach().numpy() for name, table in training.tables.items()},
        **{f"dense/{name}": value.numpy() for name, value in training.dense.state_dict().items()},
    }


def main() -> int:
    setup = RunSetup.load(Path(sys.argv[1]))
    np.savez(Path(setup.directory) / "reference.npz", **run(setup))
    return 0


if __name__ == "__main__":
    sys.exit(main())
