#!/usr/bin/env python3
"""A table larger than memory: flexd's frames and slow rows beside a memory map and a key-value store.

    python tools/bench_memory.py [--quick] [--json] [--rows 25000000] [--limit-mib 1536] [--zipf 1.05] [--only WAY ...]

Each way trains the same batches with row-wise Adagrad in a process of its own, in a memory cgroup (version 1) that
holds everything the process has, page cache included; only "all fast" has no limit. Files are on this machine's disk.
Every way is warmed up for as many seconds before it is measured; ``steps`` says how far it came.

- all fast: tensors in memory, no limit.
- memory map: ``torch.from_file``, the page cache as everyone's default.
- RocksDB: rocksdict (PyPI), direct I/O, a block cache of the size of flexd's frames. Missing without the package.
- flexd, LRU: frames by last use. flexd: frames by decayed counts. flexd, run-ahead: with ``flexd.prefetch``.

``--dense`` seconds of other work lie between the rows and their update; with ``flexd, run-ahead`` the rows of the next
batch come in meanwhile.

Needs root, and a version 1 memory cgroup; says so and exits 0 without.

Checks without a dense part: at least 20 times faster than the memory map and 2 times faster than RocksDB; misses below
LRU's. With ``--dense``: run-ahead at most 1.10 of all fast.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_report import check, ending

JOB = Path(__file__).parent / "bench_memory_job.py"
CGROUPS = Path("/sys/fs/cgroup/memory")
WAYS = ("all fast", "memory map", "RocksDB", "flexd, LRU", "flexd", "flexd, run-ahead")
FAST_SHARE = 0.55
"""Of the limit, for frames or for the block cache: the rest is the interpreter, torch and a step's own memory."""
JOB_SECONDS = 1500.0


def why_not() -> str | None:
    """Why no limit can be set here, in words; None if one can."""
    if os.geteuid() != 0:
        return "a memory limit needs root"
    if not (CGROUPS / "memory.limit_in_bytes").exists():
        return "no memory cgroup of version 1"
    return None


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


def run(way: str, setting: dict[str, Any], limit_bytes: int | None, directory: Path) -> dict[str, Any]:
    """Run one way in a directory of its own. The answer has ``error`` where it failed."""
    here = Path(tempfile.mkdtemp(dir=directory))
    command = [sys.executable, str(JOB), way, json.dumps(setting), str(here)]
    try:
        with limited(None if way == "all fast" else limit_bytes) as group:

            def join() -> None:
                if group is not None:
                    (group / "cgroup.procs").write_text(str(os.getpid()))

            ended = subprocess.run(command, capture_output=True, text=True, timeout=JOB_SECONDS, preexec_fn=join)
        if ended.returncode:
            return {"error": f"exit {ended.returncode}: {ended.stderr.strip()[-400:]}"}
        answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return answer
    except subprocess.TimeoutExpired:
        return {"error": f"not within {JOB_SECONDS:g} s"}
    finally:
        shutil.rmtree(here)


def show(way: str, answer: dict[str, Any], all_fast: float | None) -> None:
    if "error" in answer:
        print(f"{way:<18}failed: {answer['error']}", flush=True)
        return
    words = [f"{answer['step_seconds'] * 1e3:10.1f} ms a step ({answer['steps']} after {answer['warm_steps']})"]
    if all_fast:
        words.append(f"{answer['step_seconds'] / all_fast:.2f} of all fast")
    if answer.get("used"):
        words.append(f"misses {answer['missed'] / answer['used']:.3f} with {answer['frames']:,} frames")
        words.append(f"read {answer['bytes_read'] / 1e6:.1f} MB, written {answer['bytes_written'] / 1e6:.1f} MB")
        words.append(f"waited {answer['slow_seconds'] * 1e3:.0f} ms for the disk")
    print(f"{way:<18}" + "; ".join(words), flush=True)


def checks_of(answers: dict[str, dict[str, Any]], dense: bool) -> list[dict[str, Any]]:
    seconds = {way: answer["step_seconds"] for way, answer in answers.items() if "step_seconds" in answer}
    checks = []
    if dense:
        if {"all fast", "flexd, run-ahead"} <= seconds.keys():
            ratio = seconds["flexd, run-ahead"] / seconds["all fast"]
            checks.append(check("run-ahead behind a dense part / all fast", ratio, "<= 1.1", ratio <= 1.1))
        return checks
    for peer, least in (("memory map", 20.0), ("RocksDB", 2.0)):
        if {peer, "flexd"} <= seconds.keys():
            ratio = seconds[peer] / seconds["flexd"]
            checks.append(check(f"{peer} / flexd", ratio, f">= {least:g}", ratio >= least))
    if {"flexd", "flexd, LRU"} <= seconds.keys():
        ours, lru = (answers[way]["missed"] / answers[way]["used"] for way in ("flexd", "flexd, LRU"))
        checks.append(check("misses / LRU's", ours / lru, "< 1", ours < lru))
    return checks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=25_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ids", type=int, default=25_600, help="look-ups a step")
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--limit-mib", type=int, default=1536)
    parser.add_argument("--dense", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--warm-seconds", type=float, default=90.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="measured of each way")
    parser.add_argument("--only", nargs="+", choices=WAYS, metavar="WAY", default=list(WAYS))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="300,000 rows of 64, 2,560 ids, 400 MiB, a second each")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if not given.directory.is_dir():
        parser.error(f"--directory {given.directory}: no such directory")
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    if given.quick:
        given.rows, given.dim, given.ids, given.limit_mib = 300_000, 64, 2_560, 512
        given.warm_seconds, given.seconds = 0.5, 1.0
    limit = given.limit_mib << 20
    setting = {
        "rows": given.rows, "dim": given.dim, "ids": given.ids, "zipf": given.zipf, "dense_seconds": given.dense,
        "fast_bytes": (16 << 20) if given.quick else int(limit * FAST_SHARE),
        "warm_seconds": given.warm_seconds, "seconds": given.seconds,
    }  # fmt: skip
    ways = [way for way in given.only if way != "RocksDB" or importlib.util.find_spec("rocksdict") is not None]
    if "RocksDB" in given.only and "RocksDB" not in ways:
        print("not run: RocksDB (pip install rocksdict)")
    print(
        f"{given.rows:,} rows of {given.dim} float32 ({given.rows * given.dim * 4 / 2**30:.1f} GiB), {given.ids:,} ids "
        f"a step, Zipf {given.zipf:g}, {given.limit_mib:,} MiB for a process, dense part {given.dense:g} s",
        flush=True,
    )
    answers: dict[str, dict[str, Any]] = {}
    for way in ways:
        answers[way] = run(way, setting, limit, given.directory)
        show(way, answers[way], answers.get("all fast", {}).get("step_seconds"))
    checks = [] if given.quick else checks_of(answers, given.dense > 0)
    failed = [way for way, answer in answers.items() if "error" in answer]
    code = ending(answers, checks, as_json=given.json)
    return 1 if failed else code


if __name__ == "__main__":
    sys.exit(main())
