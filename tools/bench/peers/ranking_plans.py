"""Plans for ``cases.ranking``, as documents of ``flexd shard``: TorchRec's planner, AutoShard's greedy, flexd's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexd.planner.tables.sharding import (
    TableStatistics,
    listed_seconds,
    plan_rules,
    rules_document,
    shard_tables,
    sharding_document,
)
from flexd.topology.cluster import Cluster, Exposed, StepCosts
from tools.bench.ranking_tables import POOLED, SEQUENCES, Setting
from tools.bench.workloads import INTRA_BYTES_PER_SECOND, given_cluster

Document = dict[str, Any]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

MEMORY_BYTES = 2e9
"""Of a rank, far more than the tables take: what is compared is traffic."""


def prices(setting: Setting, rate_mbit: float) -> Cluster:
    """Return the prices of both planners of flexd, without latencies."""
    return given_cluster(setting.local_ranks, rate_mbit, latencies=False)


def torchrec_model(setting: Setting) -> torch.nn.Module:
    """Return TorchRec's collections, ``bags`` and ``rows``, without memory."""
    import torchrec

    kinds: dict[str, tuple[Any, Any]] = {
        POOLED: (torchrec.EmbeddingBagCollection, torchrec.EmbeddingBagConfig),
        SEQUENCES: (torchrec.EmbeddingCollection, torchrec.EmbeddingConfig),
    }
    model = torch.nn.Module()
    for module, (collection, config) in kinds.items():
        configs = [
            config(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
            for t in setting.listed() if t.module == module
        ]  # fmt: skip
        model.add_module(module, collection(device=torch.device("meta"), tables=configs))
    return model


def torchrec_document(setting: Setting, chosen: Mapping[str, tuple[str, Sequence[int]]]) -> Document:
    """Return the document of (sharding type, ranks) by table."""
    modules: dict[str, dict[str, Any]] = {}
    for table in setting.listed():
        kind, ranks = chosen[table.name]
        modules.setdefault(table.module, {})[table.name] = {"sharding_type": kind, "ranks": list(ranks)}
    return {"format": 1, "nodes": setting.nodes, "local_ranks": setting.local_ranks, "modules": modules}


def torchrecs_own(setting: Setting, rate_mbit: float) -> Document:
    """Plan by ``EmbeddingShardingPlanner`` with its proposers, told the bandwidths and the look-ups.

    Un-pooled tables are not data-parallel: FBGEMM's dense kernel pools them on a CPU.
    """
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    tables, layout = setting.listed(), setting.layout
    topology = Topology(
        world_size=layout.world_size, local_world_size=layout.local_ranks, compute_device="cpu",
        ddr_cap=int(MEMORY_BYTES), intra_host_bw=INTRA_BYTES_PER_SECOND / 1e3,  # bytes a millisecond
        inter_host_bw=rate_mbit * 1e6 / 8 / layout.local_ranks / 1e3,
    )  # fmt: skip
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=setting.samples, debug=False,
        constraints={
            t.name: ParameterConstraints(
                pooling_factors=[t.lookups],
                sharding_types=None if t.bags else ["table_wise", "row_wise", "column_wise"],
            )
            for t in tables
        },
    )  # fmt: skip
    sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    plan = planner.plan(torchrec_model(setting), sharders).plan  # type: ignore[arg-type]
    chosen = {
        name: (str(entry.sharding_type), list(entry.ranks or range(layout.world_size)))
        for module in plan.values() for name, entry in module.items()
    }  # fmt: skip
    return torchrec_document(setting, chosen)


def greedy_best(setting: Setting, rate_mbit: float) -> tuple[str, Document]:
    """Return the one of AutoShard's four greedy placements of whole tables whose step is predicted shortest.

    Their costs are those of its heuristic baselines (Zha et al., KDD 2022, arXiv 2208.06399, "Baselines" of the
    experiments, and the released ``autoshard`` sharders).
    """
    tables, layout = setting.listed(), setting.layout
    dim = np.array([float(t.dim) for t in tables])
    rows = np.array([float(t.rows) for t in tables])
    lookups = np.array([t.lookups for t in tables])
    costs = {
        "size": dim * rows, "dim": dim, "lookup": dim * lookups,
        "size-lookup": dim * lookups * np.log10(np.maximum(rows, 10.0)),
    }  # fmt: skip
    found: list[tuple[float, str, list[int]]] = []
    for name, cost in costs.items():
        rank = place_greedily(cost, rows * (4 * dim + 4), layout.world_size)
        placed = [replace(t, sharding="table_wise", ranks=(int(r),)) for t, r in zip(tables, rank, strict=True)]
        seconds = listed_seconds(placed, layout, prices(setting, rate_mbit), TableStatistics(setting.zipf))
        assert seconds is not None
        found.append((seconds, name, rank.tolist()))
    _, name, ranks = min(found)
    chosen = {t.name: ("table_wise", [rank]) for t, rank in zip(tables, ranks, strict=True)}
    return name, torchrec_document(setting, chosen)


def place_greedily(cost: Float64Array, size: Float64Array, ranks: int) -> Int64Array:
    """Return int64[tables] the rank of each: in descending cost, to the least loaded rank."""
    load, used = np.zeros(ranks), np.zeros(ranks)
    rank = np.empty(len(cost), np.int64)
    for table in np.lexsort((np.arange(len(cost)), -size, -cost)):
        rank[table] = best = int(np.lexsort((used, load))[0])
        load[best] += cost[table]
        used[best] += size[table]
    return rank


def flexds_for_torchrec(setting: Setting, rate_mbit: float) -> Document:
    """As ``flexd shard``."""
    tables, statistics = setting.listed(), TableStatistics(setting.zipf)
    placement = shard_tables(tables, setting.layout, prices(setting, rate_mbit), MEMORY_BYTES, statistics)
    return sharding_document(tables, placement)


def flexds(setting: Setting, rate_mbit: float, costs: StepCosts, *, prefetch_pipeline: bool) -> Document:
    """As ``flexd shard --for flexd`` with the step costs that ``flexd probe`` writes; ``prefetch_pipeline``: rows are
    fetched during the step before."""
    cluster = replace(
        prices(setting, rate_mbit), step_costs=costs, exposed=Exposed(forward=0.0 if prefetch_pipeline else 1.0)
    )
    tables, statistics = setting.listed(), TableStatistics(setting.zipf)
    return rules_document(tables, plan_rules(tables, setting.layout, cluster, MEMORY_BYTES, statistics))
