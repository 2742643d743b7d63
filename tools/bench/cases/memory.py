"""A table larger than memory: flexd's cache slots and cold rows beside a memory map.

ways: each trains the same batches with row-wise Adagrad in a memory cgroup (version 1) that holds everything its
process has, page cache included; only "all fast" has no limit. Files are on this machine's disk. The ways of flexd are
one process with one file, and begin with the most popular rows in cache slots; every way is warmed up before it is
measured.

- all fast: tensors in memory, no limit.
- memory map: ``torch.from_file``, the page cache as everyone's default. A step takes half a minute, so it is measured
  at Zipf 1.05 alone unless it is chosen by ``--ways``.
- flexd: cache slots by decayed counts. flexd, prefetch pipeline: with ``flexd.prefetch``, one batch ahead or four.

A dense part lies between the rows and their update: a device's, for which the host waits 1.25 times as long as a step
of "flexd, prefetch pipeline" without one; with the prefetch pipeline the rows of the next batch come in meanwhile.
Needs root and a version 1 memory cgroup; says so and goes on without. Checks: at Zipf 1.05 without a dense part at
least 20 times faster than the memory map; with a dense part the prefetch pipeline at most 1.10 of all fast.

billion: a table of 10^9 rows (``sections.billion_rows``). recshard: many tables, beside RecShard's split
(``sections.recshard``). file: a read-only table from a file (``sections.table_file``).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.bench.harness import ROOT, Outcome, Skipped, at_least, at_most
from tools.bench.sections import billion_rows, recshard, table_file

CGROUPS = Path("/sys/fs/cgroup/memory")
OF_FLEXD = ("flexd, prefetch pipeline", "flexd, four batches ahead", "flexd")
WAYS = (*OF_FLEXD, "all fast", "memory map")
"""In this order: the dense part of "all fast" is as long as that of the prefetch pipeline."""
FAST_SHARE = 0.55
"""Of the limit, for cache slots: the rest is the interpreter, torch and a step's own memory."""
JOB_SECONDS = 1500.0
TARGETS_AT = "1.05"
"""The exponent that the target beside the memory map is for."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--zipf", type=float, nargs="+", default=[0.9, 1.05, 1.2], help="not 1; --quick: 1.05")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY")
    parser.add_argument("--warm-seconds", type=float, default=4.0, help="before each measurement of ways")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured of each way and exponent, and of billion")
    parser.add_argument("--tables", type=Path, metavar="FILE.csv", help="TorchRec's published list, for recshard")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")


@contextmanager
def limited(limit_bytes: int | None) -> Iterator[Path | None]:
    """Yield a cgroup that a process joins by its id; None without a limit."""
    if limit_bytes is None:
        yield None
        return
    group = CGROUPS / f"flexd-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def run(ways: Sequence[str], setting: dict[str, Any], limit_bytes: int | None, directory: Path) -> dict[str, Any]:
    """Run ways that share a process, in a directory of its own; return figures by way and exponent."""
    here = Path(tempfile.mkdtemp(dir=directory))
    command = [sys.executable, "-m", "tools.bench.programs.memory", json.dumps(ways), json.dumps(setting), str(here)]
    try:
        with limited(limit_bytes) as group:

            def join() -> None:
                if group is not None:
                    (group / "cgroup.procs").write_text(str(os.getpid()))

            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=JOB_SECONDS, preexec_fn=join, check=True
            )
        answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answers
    finally:
        shutil.rmtree(here)


def checks_of(answers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    checks = []
    ours = answers.get("flexd", {}).get(TARGETS_AT)
    theirs = answers.get("memory map", {}).get(TARGETS_AT)
    if ours and theirs:
        ratio = theirs["step_seconds"] / ours["step_seconds"]
        checks.append(at_least(f"Zipf {TARGETS_AT}: memory map / flexd", ratio, 20.0))
    for zipf, fast in answers.get("all fast", {}).items():
        behind = answers.get("flexd, prefetch pipeline", {}).get(zipf)
        if behind:
            ratio = behind["device_step_seconds"] / fast["device_step_seconds"]
            checks.append(at_most(f"Zipf {zipf}: prefetch pipeline / all fast, dense part", ratio, 1.1))
    return checks


def ways_section(options: Namespace) -> Outcome:
    if os.geteuid() != 0 or not (CGROUPS / "memory.limit_in_bytes").exists():
        raise Skipped("needs root and a memory cgroup of version 1")
    ways = [way for way in WAYS if way in (options.ways or WAYS)]
    limit = 1536 << 20
    setting: dict[str, Any] = {
        "rows": 25_200_000, "dim": 128, "ids": 25_600, "zipfs": options.zipf, "fast_bytes": int(limit * FAST_SHARE),
        "warm_seconds": options.warm_seconds, "seconds": options.seconds, "dense_seconds": {},
    }  # fmt: skip
    if options.quick:
        limit = 512 << 20
        setting |= {"rows": 300_000, "dim": 64, "ids": 2_560, "zipfs": [1.05], "fast_bytes": 16 << 20}
        setting |= {"warm_seconds": 0.5, "seconds": 1.0}
    answers: dict[str, dict[str, Any]] = {}
    for together in ([way for way in ways if way in OF_FLEXD], *([way] for way in ways if way not in OF_FLEXD)):
        if not together:
            continue
        of_ways = dict(setting)
        if together == ["memory map"] and not options.ways:
            of_ways["zipfs"] = [zipf for zipf in setting["zipfs"] if str(zipf) == TARGETS_AT]
        if together != ["all fast"]:
            of_ways["dense_seconds"] = {}
        answers |= run(together, of_ways, None if together == ["all fast"] else limit, options.directory)
        for zipf, found in answers.get("flexd, prefetch pipeline", {}).items():
            setting["dense_seconds"][zipf] = found["dense_seconds"]
    # A quick table fits in the page cache of any way: its steps are compared with nothing.
    checks = checks_of(answers) if not options.quick else [
        at_least(f"{way}: steps measured", found["1.05"]["steps"], 3) for way, found in answers.items()
    ]  # fmt: skip
    return Outcome(answers, checks)


SECTIONS = {
    "ways": ways_section,
    "billion": billion_rows.section,
    "recshard": recshard.section,
    "file": table_file.section,
}
