"""Steps of one rank by flexd, ``nn.Embedding`` and TorchRec's fused kernel on one device, for ``gpu_check``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.control.protocol.report import StepPhase
from flexd.core.layout import RankLayout
from tools.bench.peers import torchrec_collection as torchrec_peer

SKEW, LEARNING_RATE = 1.05, 0.01
Step = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Size:
    """A table, the ids of a rank and step, and the number of steps."""

    rows: int
    dim: int
    ids: int
    steps: int


FULL, QUICK, TINY = Size(5_000_000, 64, 204_800, 50), Size(500_000, 64, 51_200, 20), Size(2_000, 16, 640, 3)
_BATCHES = 4


def batches(size: Size, rank: int, device: torch.device) -> list[torch.Tensor]:
    """Return int64 [ids] by Zipf; each rank has its own."""
    cumulative = np.cumsum(np.arange(1, size.rows + 1) ** -SKEW)
    names = np.random.default_rng(0).permutation(size.rows)
    random = np.random.default_rng([1, rank])
    drawn = [np.searchsorted(cumulative, random.random(size.ids) * cumulative[-1]) for _ in range(_BATCHES)]
    return [torch.from_numpy(names[at]).to(device) for at in drawn]


def flexd_steps(size: Size, layout: RankLayout, device: torch.device) -> tuple[Any, dict[str, Step]]:
    """Collective. Return a collection, and its step without and with a tap."""
    table = flexd.EmbeddingTable("item", size.rows, size.dim)
    collection = flexd.EmbeddingCollection([table], optimizer=flexd.SGD(LEARNING_RATE), layout=layout, device=device)
    flexd.Tap(collection, interval_seconds=1e9)
    counted = collection.after_lookup
    lengths = torch.tensor([size.ids], device=device)

    def step(ids: torch.Tensor) -> None:
        rows = collection({"item": flexd.Jagged(ids, lengths)})["item"].values
        rows.backward(rows.detach())
        collection.optimizer.step()

    def plain(ids: torch.Tensor) -> None:
        collection.after_lookup = None
        step(ids)

    def tapped(ids: torch.Tensor) -> None:
        collection.after_lookup = counted
        step(ids)

    return collection, {"flexd": plain, "flexd with a tap": tapped}


def embedding_step(size: Size, device: torch.device) -> Step:
    plain = torch.nn.Embedding(size.rows, size.dim, sparse=True, device=device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)

    def step(ids: torch.Tensor) -> None:
        rows = plain(ids)
        rows.backward(rows.detach())
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchrec_step(size: Size, device: torch.device) -> Step:
    """Collective. Return the step of a row-wise sharded table with FBGEMM's fused SGD."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv

    ranks = dist.get_world_size()
    config = EmbeddingConfig(num_embeddings=size.rows, embedding_dim=size.dim, name="item", feature_names=["item"])
    plain = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
    sharder = EmbeddingCollectionSharder(fused_params=fused)
    plan = construct_module_sharding_plan(
        plain, {"item": row_wise(compute_kernel="fused")}, sharder=sharder, world_size=ranks, local_size=ranks,
        device_type=device.type,
    )  # fmt: skip
    module = sharder.shard(plain, plan, ShardingEnv.from_process_group(dist.group.WORLD), device=device)
    lengths = torch.tensor([size.ids], device=device)

    def step(ids: torch.Tensor) -> None:
        rows = module(KeyedJaggedTensor(keys=["item"], values=ids, lengths=lengths))["item"].values()
        rows.backward(rows.detach())

    return step


def limit_seconds(size: Size, ids: torch.Tensor) -> float:
    """Return the time of the fewest bytes of a step at the rate of a copy on the device.

    Rows are read and written for each id, their gradients read; each distinct row is read and written once more.
    """
    device = ids.device
    source = torch.empty(min(2**26, max(2**16, size.rows * size.dim)), device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        _finish(device)
        started = time.perf_counter()
        target.copy_(source)
        _finish(device)
        seconds.append(time.perf_counter() - started)
    row_bytes = 4 * size.dim
    return (3 * len(ids) + 2 * len(ids.unique())) * row_bytes * min(seconds) / (2 * source.nbytes)


def measure(rank: int, layout: RankLayout, device: torch.device, size: Size) -> list[str]:
    """Collective. Return the lines of a report: median milliseconds of a step of each, and flexd's by phase."""
    collection, steps = flexd_steps(size, layout, device)
    steps["nn.Embedding, sparse SGD, this rank alone"] = embedding_step(size, device)
    absent = torchrec_peer.missing() or (None if dist.is_initialized() else "needs a process group")
    shape = f"{size.ids:,} ids a rank of {size.rows:,} rows x {size.dim}"
    lines = [f"step of {shape} on {device}, {layout.world_size} rank(s)"]
    given = batches(size, rank, device)
    if absent is None:
        try:
            peer = torchrec_step(size, device)
            peer(given[0])
            steps["TorchRec, row-wise, fused SGD"] = peer
        except Exception as error:  # its CPU build has no CUDA kernels
            absent = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(size.steps + _BATCHES):
        if number == _BATCHES:
            collection.phases.drain()
        for name, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            _finish(device)
            started = time.perf_counter()
            step(given[number % _BATCHES])
            _finish(device)
            if number >= _BATCHES:
                seconds[name].append(time.perf_counter() - started)
    for name, found in seconds.items():
        lines.append(f"  {name:44} {1e3 * float(np.median(found)):9.3f} ms")
    if absent is not None:
        lines.append(f"  {'TorchRec':44} skipped: {absent}")
    lines.append(f"  {'bytes of the rows at the rate of a copy':44} {1e3 * limit_seconds(size, given[0]):9.3f} ms")
    for phase in collection.phases.drain()[0]:
        if phase.phase == StepPhase.DENSE:
            continue  # the others' steps are in it
        lines.append(
            f"  phase {phase.phase:38} {1e3 * phase.computed_seconds / (2 * size.steps):9.3f} ms computed "
            f"{1e3 * phase.exposed_seconds / (2 * size.steps):9.3f} ms exposed"
        )
    return lines


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
