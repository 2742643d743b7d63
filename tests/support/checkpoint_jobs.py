"""Jobs of ranks: saving and loading checkpoints."""

from __future__ import annotations

import numpy as np
import torch

from flexd.embedding.checkpoint.given_rows import fingerprint
from flexd.embedding.checkpoint.sharded_state import CPU, saved_tables
from flexd.embedding.checkpoint.table_rows import gather_table
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import SGD, Adam, RowOptimizer, RowWiseAdagrad
from tests.support.collection_jobs import ROWS, some, train_step

OPTIMIZERS: dict[str, RowOptimizer] = {
    "sgd": SGD(0.1),
    "adam": Adam(0.05),
    "rowwise_adagrad": RowWiseAdagrad(0.1, initial_accumulator_value=0.1),
}
SAMPLES = 4


def share(step: int, rank: int, world_size: int) -> dict[str, Jagged]:
    """Return this rank's part of a batch that is equal for any number of ranks."""
    parts = [some(0, step, sample) for sample in range(SAMPLES) if sample % world_size == rank]
    out = {}
    for name in ROWS:
        ids = torch.cat([part[name].values for part in parts]) if parts else torch.arange(0)
        out[name] = Jagged(ids, torch.tensor([len(ids)]))
    return out


def train_steps(collection: EmbeddingCollection, first: int, steps: int) -> bool:
    """Train, and return whether the replicas equalled their home copies after every step."""
    equal = True
    for step in range(first, first + steps):
        train_step(collection, share(step, collection.rank, collection.layout.world_size))
        equal &= collection.replicas_bit_equal()
    return equal


def as_numpy(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {key: value.view(torch.uint8).numpy() if value.dim() else value.numpy() for key, value in state.items()}


def whole(collection: EmbeddingCollection) -> dict[str, np.ndarray]:
    """Return all tables and state as bytes."""
    return as_numpy(whole_state_dict(collection))


def whole_state_dict(collection: EmbeddingCollection) -> dict[str, torch.Tensor]:
    """Collective. Return the content of ``ShardedState`` as whole tables in host memory on every rank.

    A module with an ``nn.Embedding`` at ``embeddings.<table>`` can load them.
    """
    engine = collection.engine
    engine.settle()
    state: dict[str, torch.Tensor] = {}
    with collection.traffic.uncounted(), torch.no_grad():
        for table in saved_tables(collection):
            whole = [gather_table(engine.groups.world, table.homes, held, CPU) for held in table.columns.values()]
            state |= zip(table.columns, whole, strict=True)
            state[table.fingerprint_key] = fingerprint(0, whole)
    state[f"optimizer.{collection.keyspace.tables[0].optimizer}.step"] = torch.tensor(engine.steps)
    return state
