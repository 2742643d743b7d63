"""A model in TorchRec's ``DistributedModelParallel`` with a plan that ``flexd.torchrec.sharding_plan`` made."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from flexd.torchrec import sharding_plan

ROWS = (64, 40, 96, 24, 80)
RATE = 50.0


def model(device: str = "cpu") -> nn.Module:
    """Five pooled tables of 64 columns in ``bags``, two un-pooled ones in ``rows``.

    Un-pooled ones have a fused optimizer: without one TorchRec takes FBGEMM's dense kernel, which on a CPU pools them
    whatever it is told, so that the look-up ends with sizes that do not add up.
    """
    constant = partial(nn.init.constant_, val=0.1)
    with_values = {"embedding_dim": 64, "init_fn": constant}
    bags = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, feature_names=[f"f{i}"], **with_values)
        for i, rows in enumerate(ROWS)
    ]
    rows = [
        EmbeddingConfig(name=f"s{i}", num_embeddings=count, feature_names=[f"g{i}"], **with_values)
        for i, count in enumerate((48, 32))
    ]
    found = nn.Module()
    found.bags = torchrec.EmbeddingBagCollection(tables=bags, device=torch.device(device))
    found.rows = torchrec.EmbeddingCollection(tables=rows, device=torch.device(device))
    apply_optimizer_in_backward(torch.optim.SGD, found.rows.parameters(), {"lr": RATE})
    return found


def constrained() -> Any:
    """The model with what TorchRec's planner is told of its tables, as an entry point of ``flexd shard``."""
    from torchrec.distributed.planner import ParameterConstraints

    return model("meta"), {"t0": ParameterConstraints(pooling_factors=[40.0], batch_sizes=[32])}


def _batch(rank: int, step: int) -> KeyedJaggedTensor:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    keys = [*(f"f{i}" for i in range(5)), "g0", "g1"]
    lengths = torch.randint(0, 5, (len(keys) * 8,), generator=drawn)
    values = torch.randint(0, 24, (int(lengths.sum()),), generator=drawn)
    return KeyedJaggedTensor(keys, values, lengths=lengths)


def _of(batch: KeyedJaggedTensor, kind: str) -> KeyedJaggedTensor:
    parts = batch.to_dict()
    names = [name for name in parts if name[0] == kind]
    return KeyedJaggedTensor(
        names,
        torch.cat([parts[name].values() for name in names]),
        lengths=torch.cat([parts[name].lengths() for name in names]),
    )


def train(rank: int, document: dict[str, Any], steps: int) -> tuple[list[float], dict[str, str]]:
    """Return the mean loss of the ranks in every step, and the sharding type of each table."""
    os.environ["LOCAL_WORLD_SIZE"] = str(document["local_ranks"])
    plan = sharding_plan(made := model(), document, device_type="cpu")
    kinds = {name: entry.sharding_type for module in plan.plan.values() for name, entry in module.items()}
    parallel = DistributedModelParallel(made, device=torch.device("cpu"), plan=plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    target = torch.linspace(-1, 1, 64)
    losses = []
    for step in range(steps):
        batch = _batch(rank, step)
        bags = parallel.module.bags(_of(batch, "f")).wait().values().view(8, 5, 64)
        rows = parallel.module.rows(_of(batch, "g"))
        loss = (bags - target).square().mean()
        loss = loss + torch.cat([rows[name].values() - target for name in ("g0", "g1")]).square().sum() / 2000
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses, kinds
