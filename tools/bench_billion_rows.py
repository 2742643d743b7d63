#!/usr/bin/env python3
"""A table of a billion rows from a sparse file: how long the start takes, and what training takes of memory and disk.

    python tools/bench_billion_rows.py [--quick] [--json] [--rows 1e9] [--dim 64] [--fast-mib 512] [--seconds 60]

One rank in this process, row-wise Adagrad, Zipf-popular rows. Rows that were never written are made from their seed, so
the file has only what training has written back. At the end the rows of a batch are read again and compared with plain
training of the same batches, which needs the rows that they used alone.

Checks: start within 10 s; resident memory within the fast memory given and 1.5 GiB beside it; rows equal to plain
training's. The time of a start is judged only without ``--quick`` (10^7 rows, a second).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_memory_job import Flexd, batches, process_figures
from bench_report import check, ending
from memory_dense import NO_DENSE
from process_memory import peak_resident_bytes, reset_peak, resident_bytes

START_SECONDS, BESIDE_BYTES, TOLERANCE = 10.0, 1.5 * 2**30, 1e-5
ZIPF, COMPARED_STEPS = 1.05, 4


def run(rows: int, dim: int, ids: int, fast_bytes: int, seconds: float, directory: Path) -> dict[str, float]:
    """Return figures of the start, of a step and of what is taken at the end."""
    setting = {"rows": rows, "dim": dim, "ids": ids, "fast_bytes": fast_bytes, "filled": False}
    reset_peak()
    resident_before = resident_bytes()
    began = time.perf_counter()
    held = Flexd(setting, directory)
    figures = {"start_seconds": time.perf_counter() - began}
    drawn, dense = batches(rows, ids, ZIPF, seed=1), NO_DENSE.runner()
    figures["difference"] = difference(held, [next(drawn) for _ in range(COMPARED_STEPS)])
    before, took, end = held.figures() | process_figures(), [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(took) < 3:
        batch = next(drawn)
        clock = time.perf_counter()
        held.step(batch, dense)
        took.append(time.perf_counter() - clock)
    after = held.figures() | process_figures()
    (path,) = directory.glob("*.rows")
    figures |= {
        "step_seconds": float(np.median(took)), "steps": len(took), "frames": after["frames"],
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
    from flexd.embedding.row_optimizers import RowWiseAdagrad

    used = torch.cat(list(given)).unique()
    plain = held.rows(used)
    first, state = plain.clone(), torch.zeros(len(used), 1)
    optimizer = RowWiseAdagrad(lr=held.learning_rate)
    for number, ids in enumerate(given):
        held.step(ids, NO_DENSE.runner())
        distinct, counts = ids.unique(return_counts=True)
        at = torch.searchsorted(used, distinct)
        optimizer.update(plain, state, at, plain.index_select(0, at) * counts[:, None], number + 1)
    if torch.equal(first, plain):
        return float("inf")
    return float((held.rows(used) - plain).abs().max() / plain.abs().max())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=1e9)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=int, default=25_600, help="look-ups a step")
    parser.add_argument("--fast-mib", type=int, default=512, help="fast_memory_bytes")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on a disk")
    parser.add_argument("--quick", action="store_true", help="10^7 rows, 2,560 ids, 2 MiB, a second")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.quick:
        given.rows, given.ids, given.fast_mib, given.seconds = 1e7, 2_560, 2, 1.0
    rows, fast_bytes = int(given.rows), given.fast_mib << 20
    torch.set_num_threads(2)
    print(
        f"{rows:,} rows of {given.dim} float32 ({rows * given.dim * 4 / 2**30:,.1f} GiB), {given.fast_mib} MiB of fast "
        f"memory, {given.ids:,} look-ups a step, Zipf {ZIPF:g}; load of the machine {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        figures = run(rows, given.dim, given.ids, fast_bytes, given.seconds, Path(directory))
    print(
        f"start {figures['start_seconds']:.2f} s; {figures['step_seconds'] * 1e3:.1f} ms a step "
        f"({figures['steps']:.0f} steps; {figures['processor_seconds a step'] * 1e3:.0f} ms of processor time, waited "
        f"{figures['slow_seconds a step'] * 1e3:.0f} ms for slow rows); misses {figures['misses']:.3f} with "
        f"{figures['frames']:,.0f} frames\nlargest resident {figures['resident_bytes'] / 2**20:,.0f} MiB; file "
        f"{figures['file_bytes'] / 2**30:,.1f} GiB, of which {figures['file_bytes_on_disk'] / 2**20:,.1f} MiB are on "
        f"the disk; rows beside plain training differ by {figures['difference']:.1e}"
    )
    checks: list[dict[str, Any]] = []
    if not given.quick:
        start = figures["start_seconds"]
        checks.append(check("seconds until the first step", start, f"< {START_SECONDS:g}", start < START_SECONDS))
    most = fast_bytes + BESIDE_BYTES
    resident, apart = figures["resident_bytes"], figures["difference"]
    checks.append(check("resident bytes", resident, f"<= {most:.4g}", resident <= most))
    checks.append(check("rows beside plain training", apart, f"<= {TOLERANCE:g}", apart <= TOLERANCE))
    return ending(figures, checks, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
