"""Train on the GPUs of this machine in every mode against plain training on the CPU, to 1e-5.

    python -m tools.gpu_check [--device cuda]

On one GPU as one NCCL rank and on two as two: exchanges, copies of rows, prefetch pipeline, bags, and a
saved and loaded state. Without a GPU nothing runs, and it ends with 0; with ``--device cpu`` the modes run over gloo,
which tests the command. Exit status 1 if tables differ. Times: ``python -m tools.bench step --device cuda``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.core.placement import Delta, RankLayout
from tools.bench.ranks import on_ranks

TOLERANCE = 1e-5
COPIED_ROWS = 100
_TABLES = {"items": (5_000, 64), "users": (3_000, 32)}


@dataclass(frozen=True)
class Mode:
    """A way to train that must not change the result.

    Attributes:
        copies: rows get copies on every rank in the second step.
        saved: in the middle the state is saved, the tables are reset, and it is loaded.
    """

    name: str
    exchange: str = "chain"
    copies: bool = False
    ahead: bool = False
    pooled: bool = False
    saved: bool = False


MODES = (
    Mode("chain"),
    Mode("direct", exchange="direct"),
    Mode("copies of rows", copies=True),
    Mode("prefetch pipeline with copies", copies=True, ahead=True),
    Mode("bags", pooled=True),
    Mode("saved and loaded", saved=True),
)


def train(rank: int, ranks: int, device: str, mode: Mode) -> dict[str, torch.Tensor]:
    """Collective. Return the tables after six steps, on the CPU."""
    make, kind = flexd.EmbeddingCollection, flexd.EmbeddingTable
    if mode.pooled:
        make, kind = flexd.EmbeddingBagCollection, flexd.EmbeddingBagTable
    collection = make(
        [kind(name, rows, dim) for name, (rows, dim) in _TABLES.items()],
        optimizer=flexd.RowWiseAdagrad(lr=0.1), layout=RankLayout(1, ranks), exchange=mode.exchange,
        replica_slots=[COPIED_ROWS] * len(_TABLES), device=device,
    )  # fmt: skip
    given = [_features(step, rank, device) for step in range(6)]
    for step, features in enumerate(flexd.prefetch(given, collection, ahead=1) if mode.ahead else given):
        if step == 1 and mode.copies and ranks > 1:
            none, every = np.zeros(COPIED_ROWS, np.uint8), np.full(COPIED_ROWS, 2, np.uint8)
            collection.engine.inbox.offer(1, Delta(np.arange(COPIED_ROWS), none, every))
        if step == 3 and mode.saved:
            saved = collection.state_dict()
            collection.reset_parameters()
            collection.load_state_dict(saved)
        found = collection(features).values()
        rows = [one if isinstance(one, torch.Tensor) else one.values for one in found]
        sum((each.square().sum() for each in rows), start=torch.zeros((), device=device)).backward()
        collection.optimizer.step()
    if collection.placement_version != (mode.copies and ranks > 1):
        raise RuntimeError(f"{mode.name}: placement {collection.placement_version} after the last step")
    return {name: collection.gather_table(name, device="cpu") for name in _TABLES}


def _features(step: int, rank: int, device: str) -> dict[str, flexd.Jagged]:
    features = {}
    for number, (name, (rows, _)) in enumerate(_TABLES.items()):
        ids = torch.randint(rows, (512,), generator=torch.Generator().manual_seed(100 * step + 10 * rank + number))
        features[name] = flexd.Jagged(ids.to(device), torch.full((64,), 8, device=device))
    return features


def check_exactness(kind: str) -> list[str]:
    """Collective. Train in every mode on the device, and without copies and the prefetch pipeline by the chain on the
    CPU.

    Returns:
        A line by mode.

    Raises:
        RuntimeError: tables differ by more than ``TOLERANCE``.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = {pooled: train(rank, ranks, "cpu", Mode("chain", pooled=pooled)) for pooled in (False, True)}
    lines = []
    for mode in MODES:
        on_device, on_cpu = train(rank, ranks, kind, mode), expected[mode.pooled]
        worst = max(float((on_device[name] - on_cpu[name]).abs().max()) for name in _TABLES)
        lines.append(f"{ranks} rank(s), {mode.name}: largest difference from the CPU {worst:.1e}")
        if not worst <= TOLERANCE:
            raise RuntimeError(f"{mode.name}: tables differ from those of the CPU by {worst:.1e}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    kind = parser.parse_args(arguments).device
    devices = 2
    if kind == "cuda":
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        print(f"torch {torch.__version__}, GPUs: {[torch.cuda.get_device_name(gpu) for gpu in range(devices)]}")
    for ranks in range(1, min(devices, 2) + 1):
        try:
            print(*on_ranks(check_exactness, 1, ranks, kind, cuda=kind == "cuda")[0], sep="\n", flush=True)
        except RuntimeError as error:
            print(f"{ranks} rank(s): {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
