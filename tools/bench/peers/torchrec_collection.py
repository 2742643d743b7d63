"""TorchRec's sharded EmbeddingCollection as a peer: tables, initial values and optimizer as of a flexd collection.

Versions that run on a CPU: torchrec 1.9.2 and fbgemm-gpu-cpu 1.8.0 (1.9.0 does not load) with torch 2.13.0,
installed without their dependencies (``make torchrec``). Import this module only where ``missing()`` is None.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.row_hashes import fill_initial_rows

Int64Array = npt.NDArray[np.int64]
MODULES = ("torchrec", "fbgemm_gpu")


def missing() -> str | None:
    """Which of its packages are not installed, in words; None if they all are."""
    absent = [name for name in MODULES if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)} (make torchrec)" if absent else None


def keyed(names: Sequence[str], values: Sequence[Int64Array], lengths: Sequence[Int64Array]) -> Any:
    """Return TorchRec's input of features given one by one."""
    from torchrec import KeyedJaggedTensor

    joined, of_samples = torch.from_numpy(np.concatenate(values)), torch.from_numpy(np.concatenate(lengths))
    return KeyedJaggedTensor(list(names), joined, lengths=of_samples)


def sharded_collection(
    tables: Sequence[EmbeddingTable],
    *,
    sharding: str,
    local_ranks: int,
    learning_rate: float,
    eps: float,
    seed: int = 0,
    half_precision: bool = False,
    device: torch.device | None = None,
) -> torch.nn.Module:
    """Collective. A TorchRec ``ShardedEmbeddingCollection`` over the default process group.

    FBGEMM's fused row-wise Adagrad (EXACT_ROWWISE_ADAGRAD); gradients of all ranks are summed, not averaged.

    Args:
        sharding: "row_wise", or "table_wise" (table t on rank t modulo ranks).
        half_precision: rows and gradients travel as float16 (TorchRec's quantised communication; on gloo it does not
            do bfloat16).
        device: default: the CPU.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.comm_ops import set_gradient_division
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv

    set_gradient_division(False)
    device = device or torch.device("cpu")
    module = EmbeddingCollection(
        [
            EmbeddingConfig(
                name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=list(t.feature_names)
            )
            for t in tables
        ],
        device=torch.device("meta"),
    )
    codecs = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16), device=torch.device("cpu")
    )
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": learning_rate, "eps": eps},
        qcomm_codecs_registry=codecs if half_precision else None,
    )
    world = dist.get_world_size()
    of_table: Mapping[str, Callable[[int], Any]] = {
        "row_wise": lambda _: row_wise(compute_kernel="fused"),
        "table_wise": lambda table: table_wise(rank=table % world, compute_kernel="fused"),
    }
    plan = construct_module_sharding_plan(
        module,
        {t.name: of_table[sharding](i) for i, t in enumerate(tables)},
        sharder=sharder,
        local_size=local_ranks,
        world_size=world,
        device_type=device.type,
    )
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), device)
    _fill(sharded, tables, seed)
    return sharded


def sharded_by_document(
    model: torch.nn.Module,
    tables: Sequence[EmbeddingTable],
    document: Mapping[str, Any],
    *,
    learning_rate: float,
    eps: float,
    seed: int = 0,
) -> dict[str, torch.nn.Module]:
    """Collective. TorchRec's sharded collections of a model on ``meta``, on CPU, by a plan of ``flexd shard``: by path.

    As in ``sharded_collection``: fused row-wise Adagrad, summed gradients. Data-parallel tables are not updated: their
    parameters have gradients, averaged over the ranks. Un-pooled collections go past ``DistributedModelParallel``.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.comm_ops import set_gradient_division
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingEnv

    from flexd.torchrec import sharding_plan

    set_gradient_division(False)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": learning_rate, "eps": eps}
    sharders = {
        sharder.module_type: sharder
        for sharder in (
            EmbeddingBagCollectionSharder(fused_params=fused),
            EmbeddingCollectionSharder(fused_params=fused),
        )
    }
    plan = sharding_plan(model, document, device_type="cpu").plan
    environment, found = ShardingEnv.from_process_group(dist.group.WORLD), {}
    for path, of_module in plan.items():
        for entry in of_module.values():
            if entry.sharding_type != "data_parallel":
                entry.compute_kernel = "fused"
            elif hasattr(model.get_submodule(path), "embedding_configs"):
                raise ValueError(
                    f"{path}: an un-pooled data-parallel table, which FBGEMM's dense kernel pools on a CPU"
                )
        module = model.get_submodule(path)
        found[path] = sharders[type(module)].shard(module, of_module, environment, torch.device("cpu"))
        _fill(found[path], tables, seed)
    return found


def _fill(sharded: torch.nn.Module, tables: Sequence[EmbeddingTable], seed: int) -> None:
    """Set every shard to its part of the initial rows of a flexd table."""
    by_name = {table.name: table for table in tables}
    for name, parameter in sharded.state_dict().items():
        table = by_name[name.split(".")[-2]]
        shards = (
            [(shard.metadata.shard_offsets, shard.tensor) for shard in parameter.local_shards()]
            if hasattr(parameter, "local_shards")
            else [((0, 0), parameter)]
        )
        for (row, column), tensor in shards:
            count, width = tensor.shape
            rows = torch.empty((count, table.dim), dtype=tensor.dtype)
            fill_initial_rows(rows, table.name, range(row, row + count), scale=table.scale, seed=seed)
            tensor.copy_(rows[:, column : column + width])
