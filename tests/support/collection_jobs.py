"""Jobs of ranks: small tables with skewed batches, evaluation, construction."""

import numpy as np
import torch
from torch import nn

import flexd
from flexd.core.placement import REHOMED, Delta, Placement, RankLayout
from flexd.embedding.checkpoint.sharded_state import CPU
from flexd.embedding.checkpoint.table_rows import collect, fingerprint
from flexd.embedding.checkpoint.whole_tables import whole_tables
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import SGD, Adam, RowOptimizer, RowWiseAdagrad


def ids(*rows: int) -> dict[str, flexd.Jagged]:
    return {"item": flexd.Jagged(torch.tensor(rows, dtype=torch.int64), torch.tensor([len(rows)]))}


def pair(lr: float = 0.3, **more: object) -> tuple[flexd.EmbeddingCollection, nn.Embedding]:
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 20, 4, dtype="float64")], optimizer=flexd.SGD(lr), **more
    )  # type: ignore[arg-type]
    return collection, nn.Embedding.from_pretrained(collection.initial_table("item"), freeze=False)


def close(collection: flexd.EmbeddingCollection, plain: nn.Embedding) -> bool:
    return torch.allclose(collection.gather_table("item"), plain.weight.detach(), rtol=0, atol=1e-12)


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
    equal = True
    for step in range(first, first + steps):
        train_step(collection, share(step, collection.rank, collection.layout.world_size))
        equal &= collection.replicas_bit_equal()
    return equal


def as_numpy(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {key: value.view(torch.uint8).numpy() if value.dim() else value.numpy() for key, value in state.items()}


def whole(collection: EmbeddingCollection) -> dict[str, np.ndarray]:
    return as_numpy(whole_state_dict(collection))


def whole_state_dict(collection: EmbeddingCollection) -> dict[str, torch.Tensor]:
    """Collective. Return the content of ``ShardedState`` as whole tables in host memory on every rank.

    A module with an ``nn.Embedding`` at ``embeddings.<table>`` can load them.
    """
    engine = collection.engine
    engine.settle()
    state: dict[str, torch.Tensor] = {}
    with collection.traffic.uncounted(), torch.no_grad():
        for table in whole_tables(collection):
            everything = [range(table.homes.rows)] * table.homes.world_size
            whole = collect(engine.groups.world, table.homes, list(table.columns.values()), everything, CPU)
            state |= zip(table.columns, whole, strict=True)
            state[table.fingerprint_key] = fingerprint(0, whole)
    state[f"optimizer.{collection.keyspace.tables[0].optimizer}.step"] = torch.tensor(engine.steps)
    return state


ROWS = {"item": 61, "odd": 23, "tiny": 3}
"""``tiny`` has fewer rows than a world of four ranks."""


def tables(dtype: str = "float64", names: tuple[str, ...] = tuple(ROWS)) -> list[EmbeddingTable]:
    dims = {"item": 8, "odd": 3, "tiny": 2}
    return [EmbeddingTable(name, ROWS[name], dims[name], dtype=dtype, init_scale=0.5) for name in names]


def some(seed: int, step: int, rank: int) -> dict[str, Jagged]:
    """Return skewed ids of every table, sometimes none."""
    rng = np.random.default_rng([seed, step, rank])
    out = {}
    for name, rows in ROWS.items():
        count = int(rng.integers(0, 40))
        out[name] = Jagged(torch.from_numpy((rng.zipf(1.3, count) - 1) % rows), torch.tensor([count]))
    return out


def loss_of(out: dict[str, Jagged]) -> torch.Tensor:
    return torch.stack([jagged.values.double().sin().sum() for jagged in out.values()]).sum()


def train_step(collection: EmbeddingCollection, features: dict[str, Jagged]) -> None:
    loss_of(collection(features)).backward()
    collection.optimizer.step()


def offer(collection: EmbeddingCollection, delta: Delta) -> None:
    collection.engine.inbox.offer(collection.engine.inbox._received_version + 1, delta)


def random_placement(seed: int, rows: int = 50, moves_on: RankLayout | None = None) -> Placement:
    """Return a placement with copies of some rows; with ``moves_on`` a part of them are in other nodes instead."""
    rng = np.random.default_rng(seed)
    keys = rng.choice(sum(ROWS.values()), size=rows, replace=False).astype(np.int64)
    tiers = rng.integers(1, 3, size=rows).astype(np.uint8)
    if moves_on is not None and moves_on.nodes > 1:
        to = (moves_on.home_node(keys) + rng.integers(1, moves_on.nodes, size=rows)) % moves_on.nodes
        tiers = np.where(rng.random(rows) < 0.5, REHOMED + to, tiers).astype(np.uint8)
    return Placement.of(keys, tiers)
