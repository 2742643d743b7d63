"""Train the same data in one plain process, and count the bytes of row-wise sharding for the same batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from flexd.core.keyspace import KeySpace
from flexd.core.placement import RankLayout
from flexd.demo.setup import LEARNING_RATE, RunSetup
from flexd.demo.training import ADAGRAD_EPS, batches_of, dense_of, features_of, loss_of, tables_of
from flexd.embedding.collection import EmbeddingCollection
from flexd.simulate.accesses import StepKeys, TouchCounter
from flexd.stream.batches import Batch, Batches

ID_BYTES = 8


def row_wise_bytes(keyspace: KeySpace, layout: RankLayout, batch: Batch, rank: int, *, dedup: bool) -> int:
    """Return the inter-node bytes of a pass if the rank requested every row from its home, and pushed its gradient:
    those of id, row and gradient for every (distinct) id whose home is in another node."""
    total = 0
    for table, ids in enumerate(batch.ids):
        keys = keyspace.keys(table, np.unique(ids) if dedup else ids)
        far = int((layout.home_node(keys) != layout.node_of(rank)).sum())
        total += far * (ID_BYTES + 2 * keyspace.tables[table].row_bytes)
    return total


class PlainTraining:
    """``nn.Embedding`` tables and row-wise Adagrad on all ranks' batches, in one process."""

    def __init__(self, setup: RunSetup, batches: Batches) -> None:
        self._batches = batches
        specs = tables_of(setup, batches)
        start = EmbeddingCollection(specs, layout=RankLayout(1, 1), seed=setup.options.seed)
        self.keyspace = start.keyspace
        self.tables = {
            spec.name: nn.Embedding(spec.rows, spec.dim, _weight=start.initial_table(spec.name)) for spec in specs
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
                rows = [table(features[name].values) for name, table in self.tables.items() if name in features]
                loss = loss_of(self.dense, batch, rows) / len(of_rank)
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


def run(setup: RunSetup) -> dict[str, Any]:
    """Train all steps; return the record, by name."""
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
