"""Jobs of ranks: training with the bytes of every step, and the keys of the same steps for the simulator."""

from __future__ import annotations

import numpy as np
import torch

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.jagged import Jagged
from flexd.embedding.row_optimizers import SGD, RowWiseAdagrad

TABLES = {
    "one group": (("item", 61, 8, "float32"), ("shop", 17, 8, "float32")),
    "two dims": (("item", 61, 8, "float32"), ("shop", 17, 5, "float32"), ("tiny", 3, 8, "float32")),
    "two dtypes": (("item", 61, 8, "float32"), ("shop", 17, 3, "float64")),
}


def keyspace_of(kind: str, optimizer: str) -> KeySpace:
    return KeySpace([TableSpec(name, rows, dim, dtype, optimizer) for name, rows, dim, dtype in TABLES[kind]])


def ids_of(kind: str, seed: int, step: int, rank: int, micro_batch: int = 0) -> dict[str, np.ndarray]:
    """Return skewed ids of every table, sometimes none."""
    rng = np.random.default_rng([seed, step, rank, micro_batch])
    return {
        name: (rng.zipf(1.3, int(rng.integers(0, 40))) - 1) % rows if rng.random() < 0.9 else np.empty(0, np.int64)
        for name, rows, _, _ in TABLES[kind]
    }


def keys_of(kind: str, optimizer: str, seed: int, step: int, world_size: int, micro_batch: int = 0) -> list[np.ndarray]:
    keyspace = keyspace_of(kind, optimizer)
    by_rank = [ids_of(kind, seed, step, rank, micro_batch) for rank in range(world_size)]
    return [
        np.concatenate([keyspace.keys(keyspace.index[name], rows) for name, rows in ids.items()]) for ids in by_rank
    ]


def record(
    rank: int,
    layout: RankLayout,
    kind: str,
    optimizer: str,
    exchange: str,
    seed: int,
    chunks: list[Delta | None],
    micro_batches: int = 1,
    replica_sums: str = "all_reduce",
) -> list[dict[str, int]]:
    """Return the traffic of each step. Chunk t arrives before step t and is applied at the start of step t + 1."""
    collection = EmbeddingCollection(
        [EmbeddingTable(name, rows, dim, dtype=dtype) for name, rows, dim, dtype in TABLES[kind]],
        optimizer=SGD(lr=0.1) if optimizer == "sgd" else RowWiseAdagrad(lr=0.1),
        layout=layout, exchange=exchange, replica_slots=[group.rows for group in keyspace_of(kind, optimizer).groups],
        replica_sums=replica_sums,
    )  # fmt: skip
    traffic = []
    for step, chunk in enumerate(chunks):
        if chunk is not None:
            collection.engine.inbox.offer(collection.engine.inbox._received_version + 1, chunk)
        before = collection.traffic.totals()
        for micro_batch in range(micro_batches):
            features = {
                name: Jagged(torch.from_numpy(ids), torch.tensor([len(ids)]))
                for name, ids in ids_of(kind, seed, step, rank, micro_batch).items()
            }
            out = collection(features)
            torch.stack([jagged.values.double().sin().sum() for jagged in out.values()]).sum().backward()
        collection.optimizer.step()
        after = collection.traffic.totals()
        traffic.append({name: after[name] - before[name] for name in after})
    return traffic


def bags_of(
    kind: str, seed: int, step: int, rank: int, micro_batch: int = 0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return skewed ids and lengths of the bags of every table; some bags and some batches are empty."""
    rng = np.random.default_rng([seed, step, rank, micro_batch])
    found = {}
    for name, rows, _, _ in TABLES[kind]:
        lengths = rng.integers(0, 9, int(rng.integers(0, 6)))
        found[name] = (rng.zipf(1.3, int(lengths.sum())) - 1) % rows, lengths
    return found


def record_bags(
    rank: int,
    layout: RankLayout,
    kind: str,
    exchange: str,
    seed: int,
    summed: tuple[str, ...],
    steps: int,
    micro_batches: int,
    weighted: bool,
) -> list[dict[str, int]]:
    """Return the traffic of each step of training on bags; the tables ``summed`` answer by sums."""
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagTable(name, rows, dim, dtype=dtype, answer="sums" if name in summed else "rows")
            for name, rows, dim, dtype in TABLES[kind]
        ],
        optimizer=SGD(lr=0.1),
        layout=layout,
        exchange=exchange,
    )
    traffic = []
    for step in range(steps):
        before = collection.traffic.totals()
        for micro_batch in range(micro_batches):
            features = {
                name: Jagged(torch.from_numpy(ids), torch.from_numpy(lengths))
                for name, (ids, lengths) in bags_of(kind, seed, step, rank, micro_batch).items()
            }
            factors = {name: torch.ones(len(jagged.values)) for name, jagged in features.items()}
            out = collection(features, factors if weighted else None)
            torch.stack([sums.double().sin().sum() for sums in out.values()]).sum().backward()
        collection.optimizer.step()
        after = collection.traffic.totals()
        traffic.append({name: after[name] - before[name] for name in after})
    return traffic
