"""Seconds that TorchRec's planner takes for sequence tables; a process of its own, so that it can be given a budget.

    python tools/torchrec_plan.py TABLES RANKS

Prints the seconds of ``EmbeddingShardingPlanner.plan`` for that many un-pooled tables of 10^9 rows together, dims 64
and 128, on nodes of 8 ranks. Tables live on the meta device.
"""

from __future__ import annotations

import sys
import time

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology


def main(tables: int, ranks: int) -> float:
    configs = [
        EmbeddingConfig(
            name=f"t{i}", num_embeddings=10**9 // tables, embedding_dim=(64, 128)[i % 2], feature_names=[f"f{i}"]
        )
        for i in range(tables)
    ]
    collections = {
        dim: EmbeddingCollection([c for c in configs if c.embedding_dim == dim], device=torch.device("meta"))
        for dim in (64, 128)
        if any(c.embedding_dim == dim for c in configs)
    }
    module = torch.nn.ModuleDict({f"dim{dim}": collection for dim, collection in collections.items()})
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks, local_world_size=8, compute_device="cuda", hbm_cap=40 * 2**30, ddr_cap=128 * 2**30
        ),
        batch_size=512,
        constraints={c.name: ParameterConstraints(pooling_factors=[50.0]) for c in configs},
    )
    started = time.perf_counter()
    planner.plan(module, [EmbeddingCollectionSharder()])
    return time.perf_counter() - started


if __name__ == "__main__":
    print(f"{main(int(sys.argv[1]), int(sys.argv[2])):.2f}")
