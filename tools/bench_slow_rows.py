#!/usr/bin/env python3
"""What the disk does for slow rows in a file: a log of rows as they leave, and rows at fixed places.

    python tools/bench_slow_rows.py [--quick] [--json] [--directory DIR]

A table is written once; then in each step rows are read, and as many others written, as frames do it whose rows have
all changed. After the log has filled its file, so that it is cleaned, counted are blocks read and written a row, calls
of the medium, and the time of the processor. Rows are drawn evenly (the worst case of cleaning), or by Zipf's law
without the most popular, which stay in frames.

Check: a log moves at most half as many blocks.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_report import check, ending

from flexd.embedding.store.slow.file_rows import FileRows
from flexd.embedding.store.slow.log_rows import LogRows, log_rows_per_block

ROW_BYTES = 128 * 4 + 4 + 8
"""128 float32, a row-wise state and the count of uses."""
FRAMES_SHARE, ZIPF = 0.06, 1.05
KINDS: dict[str, type[LogRows] | type[FileRows]] = {"log": LogRows, "fixed places": FileRows}


def draw(kind: str, rows: int, count: int, generator: np.random.Generator) -> torch.Tensor:
    """Return int64 distinct rows, ``count`` or somewhat fewer."""
    if kind == "evenly":
        return torch.from_numpy(generator.choice(rows, count, replace=False))
    first, power = max(1.0, FRAMES_SHARE * rows), 1.0 - ZIPF
    ranks = ((rows**power - first**power) * generator.random(count) + first**power) ** (1.0 / power)
    return torch.from_numpy(np.unique(ranks.astype(np.int64) * 2_654_435_761 % rows))


def run(name: str, drawn: str, rows: int, count: int, steps: int, directory: Path) -> dict[str, float]:
    slow = KINDS[name](
        directory / name.replace(" ", "-"), rows, ROW_BYTES,
        lambda slots: torch.zeros((len(slots), ROW_BYTES), dtype=torch.uint8),
    )  # fmt: skip
    generator = np.random.default_rng(1)
    data = torch.zeros((max(count, 1 << 16), ROW_BYTES), dtype=torch.uint8)
    for first in range(0, rows, 1 << 16):
        slots = torch.arange(first, min(rows, first + (1 << 16)))
        slow.write(slots, data[: len(slots)])
    # Until as many blocks as a log has beyond the table's own are used up, nothing is cleaned.
    before = -(-rows // count) + 1
    moved: list[float] = []
    for step in range(before + steps):
        if step == before:
            slow.flush()
            traffic = slow.traffic
            moved = [
                traffic.bytes_read, traffic.bytes_written, traffic.operations, traffic.rows_written, processor_seconds()
            ]  # fmt: skip
        if step >= before:
            slow.read(draw(drawn, rows, count, generator))
        slots = draw(drawn, rows, count, generator)
        slow.write(slots, data[: len(slots)])
    slow.flush()
    traffic = slow.traffic
    written = traffic.rows_written - moved[3]
    block = log_rows_per_block(ROW_BYTES)[1]
    figures = {
        "blocks read a row": (traffic.bytes_read - moved[0]) / block / written,
        "blocks written a row": (traffic.bytes_written - moved[1]) / block / written,
        "calls a row": (traffic.operations - moved[2]) / written,
        "processor microseconds a row": (processor_seconds() - moved[4]) / written * 1e6,
        "fast bytes a row of the table": slow.fast_nbytes / rows,
    }
    slow.close()
    return figures


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--count", type=int, default=4_000, help="rows read, and written, a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on a disk")
    parser.add_argument("--quick", action="store_true", help="40,000 rows, 1,000 a step")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.quick:
        given.rows, given.count, given.steps = 40_000, 1_000, 60
    torch.set_num_threads(1)
    answers: dict[str, Any] = {}
    for drawn in ("evenly", "Zipf"):
        for name in KINDS:
            with tempfile.TemporaryDirectory(dir=given.directory) as directory:
                figures = run(name, drawn, given.rows, given.count, given.steps, Path(directory))
            answers[f"{drawn}, {name}"] = figures
            words = "  ".join(f"{what} {value:,.2f}" for what, value in figures.items())
            print(f"{drawn:<7} {name:<13} {words}", flush=True)
    checks = []
    for drawn in ("evenly", "Zipf"):
        of_log, fixed = (
            answers[f"{drawn}, {name}"]["blocks read a row"] + answers[f"{drawn}, {name}"]["blocks written a row"]
            for name in KINDS
        )
        checks.append(check(f"{drawn}: blocks, log / fixed places", of_log / fixed, "<= 0.5", of_log <= 0.5 * fixed))
    return ending(answers, checks, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
