"""TorchRec's own planner on a table list: ``EmbeddingShardingPlanner`` with its default proposers and estimates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from flexd.core.layout import RankLayout
from flexd.planner.tables.table_list import ListedTable


def planned(tables: Sequence[ListedTable], layout: RankLayout, memory_bytes: float) -> tuple[list[ListedTable], float]:
    """Return the pooled float16 tables with the shardings that it chose, and its seconds of processor time."""
    import torch
    import torchrec
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.types import DataType

    model = torch.nn.Module()
    model.bags = torchrec.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            torchrec.EmbeddingBagConfig(
                name=f"t{at}", num_embeddings=table.rows, embedding_dim=table.dim, feature_names=[f"f{at}"],
                data_type=DataType.FP16,
            )
            for at, table in enumerate(tables)
        ],
    )  # fmt: skip
    constraints = {
        f"t{at}": ParameterConstraints(
            pooling_factors=[table.lookups / table.bags], num_poolings=[table.bags], batch_sizes=[table.batch]
        )
        for at, table in enumerate(tables)
    }
    topology = Topology(
        world_size=layout.world_size, local_world_size=layout.local_ranks, compute_device="cuda",
        hbm_cap=int(memory_bytes),
    )  # fmt: skip
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=tables[0].batch, constraints=constraints, debug=False
    )
    started = time.process_time()
    plan = planner.plan(model, get_default_sharders()).plan["bags"]
    seconds = time.process_time() - started
    return [
        replace(table, sharding=plan[f"t{at}"].sharding_type, ranks=tuple(plan[f"t{at}"].ranks))
        for at, table in enumerate(tables)
    ], seconds
