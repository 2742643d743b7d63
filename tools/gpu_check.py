"""Check flexd on the GPUs of this machine, and print a report to paste.

    python -m tools.gpu_check [--quick] [--only exactness peers updates] [--device cuda]

Parts, on one GPU as one NCCL rank and on two as two:

- exactness: training on the device against plain training on the CPU, to 1e-5: exchanges, copies of rows, run-ahead,
  bags, a collection made on meta, and a saved and loaded state
- peers, updates: ``python -m tools.bench step``

Without a GPU nothing runs, and it ends with 0; with ``--device cpu`` the parts run over gloo, which tests the command
and measures nothing of a GPU. A part that fails is named at the end, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import flexd
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from tools.bench.ranks import on_ranks

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5
COPIED_ROWS = 100
_TABLES = {"items": (5_000, 64), "users": (3_000, 32)}
PARTS = ("exactness", "peers", "updates")


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
    from_meta: bool = False
    saved: bool = False


MODES = (
    Mode("chain"),
    Mode("direct", exchange="direct"),
    Mode("copies of rows", copies=True),
    Mode("run-ahead with copies", copies=True, ahead=True),
    Mode("bags", pooled=True),
    Mode("made on meta, saved and loaded", from_meta=True, saved=True),
)


def train(rank: int, ranks: int, device: str, mode: Mode) -> dict[str, torch.Tensor]:
    """Collective. Return the tables after six steps, on the CPU."""
    make, kind = flexd.EmbeddingCollection, flexd.EmbeddingTable
    if mode.pooled:
        make, kind = flexd.EmbeddingBagCollection, flexd.EmbeddingBagTable
    collection = make(
        [kind(name, rows, dim) for name, (rows, dim) in _TABLES.items()],
        optimizer=flexd.RowWiseAdagrad(lr=0.1), layout=RankLayout(1, ranks), exchange=mode.exchange,
        replica_slots=[COPIED_ROWS] * len(_TABLES), device="meta" if mode.from_meta else device,
    )  # fmt: skip
    if mode.from_meta:
        collection.to_empty(device=device)
    given = [_features(step, rank, device) for step in range(6)]
    for step, features in enumerate(flexd.prefetch(given, collection) if mode.ahead else given):
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
    """Collective. Train in every mode on the device, and without copies and run-ahead by the chain on the CPU.

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


def _benchmark(part: str, kind: str, devices: int, quick: bool) -> None:
    command = [sys.executable, "-m", "tools.bench", "step", "--only", part, "--device", kind]
    command += ["--ranks", *map(str, range(1, min(devices, 2) + 1)), *(["--quick"] if quick else [])]
    subprocess.run(command, cwd=ROOT, check=True)


def _exactness(ranks: int, kind: str) -> None:
    for line in on_ranks(check_exactness, 1, ranks, kind, cuda=kind == "cuda")[0]:
        print(line, flush=True)


def failures(runs: Sequence[tuple[str, Callable[[], None]]]) -> list[str]:
    """Run each, and return the names of those that failed; their errors are printed."""
    failed = []
    for name, run in runs:
        print(f"\n{name}", flush=True)
        try:
            run()
        except Exception as error:  # the report names whatever ended a part
            print(f"{name}: {error}", flush=True)
            failed.append(name)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short benchmarks")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    kind = options.device
    print(f"flexd with --device {kind}: Python {platform.python_version()}, torch {torch.__version__}")
    devices = 2
    if kind == "cuda":
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not devices:
            print(f"no GPU here: {', '.join(options.only)} skipped")
            return 0
        for gpu in range(devices):
            print(f"GPU {gpu}: {torch.cuda.get_device_name(gpu)}")
    runs: list[tuple[str, Callable[[], None]]] = []
    for part in options.only:
        if part == "exactness":
            runs += [(f"{part}, {n} rank(s)", partial(_exactness, n, kind)) for n in (1, 2) if n <= devices]
        else:
            runs.append((part, partial(_benchmark, part, kind, devices, options.quick)))
    failed = failures(runs)
    print(f"\nfailed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
