"""Check flexd on the GPUs of this machine, and print a report to paste.

    python tools/gpu_check.py [--quick]

On one GPU as one NCCL rank, on two as two: training on the device against the same training on the CPU, to 1e-5. Then
``bench_rows`` and ``bench_updates`` on the first GPU: look-up and update against ``nn.Embedding``, FBGEMM's kernels if
they are installed, and the rate of copying memory. Without a GPU nothing runs, and it ends with 0.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flexd
from flexd.core.layout import RankLayout
from flexd.demo.ports import free_ports

TOOLS = Path(__file__).resolve().parent
TOLERANCE = 1e-5
_TABLES = {"items": (5_000, 64), "users": (3_000, 32)}
_BENCHMARKS = ("bench_rows.py", "bench_updates.py")


def train(rank: int, ranks: int, device: str, exchange: str) -> dict[str, torch.Tensor]:
    """Collective. Return the tables after five steps, on the CPU."""
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable(name, rows, dim) for name, (rows, dim) in _TABLES.items()],
        optimizer=flexd.RowWiseAdagrad(lr=0.1), layout=RankLayout(1, ranks), exchange=exchange, device=device,
    )  # fmt: skip
    for step in range(5):
        features = {}
        for number, (name, (rows, _)) in enumerate(_TABLES.items()):
            ids = torch.randint(rows, (512,), generator=torch.Generator().manual_seed(100 * step + 10 * rank + number))
            features[name] = flexd.Jagged(ids.to(device), torch.full((64,), 8, device=device))
        rows_of = collection(features)
        sum(jagged.values.square().sum() for jagged in rows_of.values()).backward()
        collection.optimizer.step()
    return {name: collection.gather_table(name).cpu() for name in _TABLES}


def _rank(rank: int, ranks: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=ranks)
    for exchange in ("chain", "direct"):
        on_gpu, on_cpu = (train(rank, ranks, device, exchange) for device in (f"cuda:{rank}", "cpu"))
        worst = max(float((on_gpu[name] - on_cpu[name]).abs().max()) for name in _TABLES)
        if rank == 0:
            print(f"{ranks} rank(s), {exchange}: largest difference from the CPU {worst:.1e}", flush=True)
        if not worst <= TOLERANCE:
            raise SystemExit(1)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short benchmarks")
    options = parser.parse_args()
    print(f"flexd on a GPU: Python {platform.python_version()}, torch {torch.__version__}")
    if not torch.cuda.is_available():
        print("no GPU: exactness skipped, benchmarks skipped")
        return 0
    gpus = torch.cuda.device_count()
    for gpu in range(gpus):
        print(f"GPU {gpu}: {torch.cuda.get_device_name(gpu)}")
    failed = []
    for ranks in (1, 2):
        if ranks > gpus:
            print(f"{ranks} ranks: skipped, {gpus} GPU")
            continue
        try:
            mp.spawn(_rank, (ranks, free_ports(1)[0]), nprocs=ranks)
        except Exception as error:  # the report names whatever ended a rank
            print(f"{ranks} rank(s): {error}")
            failed.append(f"exactness of {ranks} rank(s)")
    for name in _BENCHMARKS:
        print(f"\n{name}", flush=True)
        command = [sys.executable, str(TOOLS / name), "--device", "cuda", *(["--quick"] if options.quick else [])]
        if subprocess.run(command, env=os.environ, check=False).returncode:
            failed.append(name)
    print(f"\nfailed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
