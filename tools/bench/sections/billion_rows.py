"""A table of a billion rows from a sparse file: how long the start takes, and what training takes of memory and disk.

One rank in this process, row-wise Adagrad, Zipf-popular rows. Rows that were never written are made from their seed, so
the file has only what training has written back. At the end the rows of a batch are read again and compared with plain
training of the same batches, which needs the rows that they used alone.

Checks: start within 10 s; resident memory within the fast memory given and 1.5 GiB beside it; rows equal to plain
training's. The time of a start is judged only without ``--quick`` (10^7 rows, a second).
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tools.bench.harness import Outcome, at_most, peak_resident_bytes, reset_peak, resident_bytes
from tools.bench.programs.memory import LEARNING_RATE, Flexd, batches, process_figures

START_SECONDS, BESIDE_BYTES, TOLERANCE = 10.0, 1.5 * 2**30, 1e-5
ZIPF, COMPARED_STEPS, DIM = 1.05, 4, 64


def run(rows: int, dim: int, ids: int, fast_bytes: int, seconds: float, directory: Path) -> dict[str, float]:
    """Return figures of the start, of a step and of what is taken at the end."""
    setting = {"rows": rows, "dim": dim, "ids": ids, "fast_bytes": fast_bytes, "filled": False}
    reset_peak()
    resident_before = resident_bytes()
    began = time.perf_counter()
    held = Flexd(setting, directory)
    figures = {"start_seconds": time.perf_counter() - began}
    drawn = batches(rows, ids, ZIPF, seed=1)
    figures["difference"] = difference(held, [next(drawn) for _ in range(COMPARED_STEPS)])
    before, took, end = held.figures() | process_figures(), [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(took) < 3:
        batch = next(drawn)
        clock = time.perf_counter()
        held.step(batch)
        took.append(time.perf_counter() - clock)
    after = held.figures() | process_figures()
    (path,) = directory.glob("*.rows")
    figures |= {
        "step_seconds": float(np.median(took)), "steps": len(took), "cache_slots": after["cache_slots"],
        "misses": (after["missed"] - before["missed"]) / (after["used"] - before["used"]),
        "resident_bytes": float(peak_resident_bytes()), "resident_bytes_before": float(resident_before),
        "file_bytes": float(path.stat().st_size), "file_bytes_on_disk": float(path.stat().st_blocks) * 512,
    }  # fmt: skip
    for name in ("processor_seconds", "bytes_read", "bytes_written", "slow_seconds"):
        figures[f"{name} a step"] = (after[name] - before[name]) / len(took)
    held.close()
    return figures


def difference(held: Flexd, given: Sequence[torch.Tensor]) -> float:
    """Train these batches, and return the largest difference of their rows from plain training's, relative to their
    values; infinite if training changed nothing."""
    from flexd.embedding.row_optimizers import GroupUpdate, RowWiseAdagrad

    used = torch.cat(list(given)).unique()
    plain = held.rows(used)
    first, state = plain.clone(), torch.zeros(len(used), 1)
    optimizer = RowWiseAdagrad(lr=LEARNING_RATE)
    for number, ids in enumerate(given):
        held.step(ids)
        distinct, counts = ids.unique(return_counts=True)
        at = torch.searchsorted(used, distinct)
        grads = plain.index_select(0, at) * counts[:, None]
        optimizer.update_groups([GroupUpdate(plain, state, [(at, grads)])], number + 1)
    if torch.equal(first, plain):
        return float("inf")
    return float((held.rows(used) - plain).abs().max() / plain.abs().max())


def section(options: Namespace) -> Outcome:
    rows, ids, fast_mib, seconds = (10**7, 2_560, 2, 1.0) if options.quick else (10**9, 25_600, 512, options.seconds)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        figures = run(rows, DIM, ids, fast_mib << 20, seconds, Path(directory))
    checks = [
        at_most("resident bytes", figures["resident_bytes"], (fast_mib << 20) + BESIDE_BYTES),
        at_most("rows beside plain training", figures["difference"], TOLERANCE),
    ]
    if not options.quick:
        checks.append(at_most("seconds until the first step", figures["start_seconds"], START_SECONDS))
    return Outcome(figures, checks)
