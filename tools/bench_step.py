"""Compare a training step of flexd with TorchRec's row-wise sharded EmbeddingCollection (fused FBGEMM kernel).

Both train on the same ranks and batches in the same run, over loopback. Needs torchrec and fbgemm-gpu-cpu.

    python tools/bench_step.py [--quick] [--json] [--ranks 2 4]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_report import check, last_line

from flexd.demo.ports import free_ports

ROWS, DIM, IDS, SKEW = 200_000, 64, 25_600, 1.05
TARGET = 1.3


def batches(rank: int) -> list[torch.Tensor]:
    share = np.arange(1, ROWS + 1) ** -SKEW
    place = np.random.default_rng(0).permutation(ROWS)
    rng = np.random.default_rng([1, rank])
    return [torch.from_numpy(place[rng.choice(ROWS, IDS, p=share / share.sum())]) for _ in range(6)]


def flexd_step(world_size: int):
    import flexd
    from flexd.core.layout import RankLayout

    table = flexd.EmbeddingTable("item", ROWS, DIM)
    collection = flexd.EmbeddingCollection([table], layout=RankLayout(world_size, 1), optimizer=flexd.SGD(0.01))

    def step(ids: torch.Tensor) -> None:
        rows = collection({"item": flexd.Jagged(ids, torch.tensor([IDS]))})["item"].values
        rows.backward(rows.detach())
        collection.optimizer.step()

    return step


def torchrec_step(world_size: int):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed.comm_ops import set_gradient_division
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv

    set_gradient_division(False)
    cpu = torch.device("cpu")
    config = EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name="item", feature_names=["item"])
    plain = EmbeddingCollection(tables=[config], device=cpu)
    sharder = EmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.01})
    plan = construct_module_sharding_plan(
        plain, {"item": row_wise(compute_kernel="fused")}, sharder=sharder, world_size=world_size,
        local_size=world_size, device_type="cpu",
    )  # fmt: skip
    module = sharder.shard(plain, plan, ShardingEnv.from_process_group(dist.group.WORLD), device=cpu)

    def step(ids: torch.Tensor) -> None:
        rows = module(KeyedJaggedTensor(keys=["item"], values=ids, lengths=torch.tensor([IDS])))["item"].values()
        rows.backward(rows.detach())

    return step


def run(rank: int, world_size: int, port: int, steps: int, out: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ids = batches(rank)
    both = {"flexd": flexd_step(world_size), "torchrec": torchrec_step(world_size)}
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for number in range(steps + 6):
        for name, step in both.items():
            dist.barrier()
            started = time.perf_counter()
            step(ids[number % len(ids)])
            if number >= 6:
                seconds[name].append(time.perf_counter() - started)
    if rank == 0:
        np.savez(out, **seconds)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    figures, checks = {}, []
    for world_size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            (port,) = free_ports(1)
            out = str(Path(folder) / "seconds.npz")
            mp.spawn(run, (world_size, port, 20 if options.quick else 100, out), nprocs=world_size)
            milliseconds = {name: values * 1e3 for name, values in np.load(out).items()}
        medians = {name: float(np.median(values)) for name, values in milliseconds.items()}
        ratio = medians["flexd"] / medians["torchrec"]
        figures[f"{world_size} ranks"] = {f"{name}_ms": value for name, value in medians.items()} | {"ratio": ratio}
        checks.append(check(f"{world_size} ranks: step over TorchRec's", ratio, f"<= {TARGET}", ratio <= TARGET))
        print(
            f"{world_size} ranks: flexd {medians['flexd']:.1f} ms, TorchRec {medians['torchrec']:.1f} ms, {ratio:.2f}"
        )
    if options.json:
        print(last_line(figures, checks))


if __name__ == "__main__":
    main()
