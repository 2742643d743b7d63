#!/usr/bin/env python3
"""A table larger than memory: flexd's frames and slow rows beside a memory map and a key-value store.

    python tools/bench_memory.py [--quick] [--json] [--zipf 0.9 1.05 1.2] [--trace FILE.npz ...] [--only WAY ...]

Each way trains the same batches with row-wise Adagrad in a memory cgroup (version 1) that holds everything its process
has, page cache included; only "all fast" has no limit. Files are on this machine's disk. The ways of flexd are one
process with one file, and begin with the most popular rows in frames; every way is warmed up before it is measured.

- all fast: tensors in memory, no limit.
- memory map: ``torch.from_file``, the page cache as everyone's default. A step takes half a minute, so it is measured
  at Zipf 1.05 alone unless it is chosen by ``--only``.
- RocksDB: rocksdict (PyPI), direct I/O, a block cache of the size of flexd's frames. Missing without the package.
- flexd, LRU: frames by last use. flexd: frames by decayed counts. flexd, run-ahead: with ``flexd.prefetch``.
- flexd, static: the most popular rows in frames for good, as RecShard's MILP chooses for one table on one rank; they
  are known exactly here, where RecShard counts a sample.

A dense part (``--no-dense`` leaves it out) lies between the rows and their update, 1.25 times as long as a step of
"flexd, run-ahead" without one; with run-ahead the rows of the next batch come in meanwhile. It is measured twice: as
time of a device, for which the host waits, and as products of matrices on one of the host's processors, which leaves
the other for reading and writing rows.

``--trace``: instead of Zipf's law the accesses of a trace, in batches of 2,048, over and over, with rows so wide that
frames hold 5 % of those that occur, in 512 MiB.

The disk's limit is measured on the file of the rows after the training: random direct reads of whole blocks.

Misses are counted once more for all policies on the same batches of a smaller table, by steps instead of
seconds, with the popularity as it is and moved (``memory_misses``).

Needs root, and a version 1 memory cgroup; says so and exits 0 without.

Checks: at Zipf 1.05 without a dense part at least 20 times faster than the memory map and 2 times faster than RocksDB;
misses below LRU's; with four batches known at most 1.25 of Belady's; the disk at 0.9 of its limit while it is waited
for. With a dense part of a device: run-ahead at most 1.10 of all fast.
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

from bench_memory_job import distinct_keys
from bench_report import check, ending
from memory_misses import AHEAD, IDS_DIVIDED, ROWS_DIVIDED, misses

JOB = Path(__file__).parent / "bench_memory_job.py"
CGROUPS = Path("/sys/fs/cgroup/memory")
OF_FLEXD = ("flexd, run-ahead", "flexd", "flexd, LRU", "flexd, static")
WAYS = (*OF_FLEXD, "all fast", "memory map", "RocksDB")
"""In this order: the dense part of "all fast" is as long as that of run-ahead."""
FAST_SHARE = 0.55
"""Of the limit, for frames or for the block cache: the rest is the interpreter, torch and a step's own memory."""
JOB_SECONDS = 1500.0
TRACE_IDS, TRACE_LIMIT_MIB, TRACE_FAST_BYTES, TRACE_SHARE = 2_048, 512, 96 << 20, 0.05
TARGETS_AT = "1.05"
"""The exponent that the targets beside the memory map and RocksDB are for."""


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


def run(
    ways: Sequence[str], setting: dict[str, Any], limit_bytes: int | None, directory: Path
) -> dict[str, dict[str, Any]]:
    """Run ways that share a process, in a directory of its own. Each answer has ``error`` where it failed."""
    here = Path(tempfile.mkdtemp(dir=directory))
    command = [sys.executable, str(JOB), json.dumps(ways), json.dumps(setting), str(here)]
    try:
        with limited(limit_bytes) as group:

            def join() -> None:
                if group is not None:
                    (group / "cgroup.procs").write_text(str(os.getpid()))

            ended = subprocess.run(command, capture_output=True, text=True, timeout=JOB_SECONDS, preexec_fn=join)
        if ended.returncode:
            return {way: {"error": f"exit {ended.returncode}: {ended.stderr.strip()[-400:]}"} for way in ways}
        answers: dict[str, dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
        return answers
    except subprocess.TimeoutExpired:
        return {way: {"error": f"not within {JOB_SECONDS:g} s"} for way in ways}
    finally:
        shutil.rmtree(here)


def of_trace(path: Path) -> dict[str, Any]:
    """Return the setting of a trace: rows so wide that frames hold ``TRACE_SHARE`` of those that occur."""
    rows = distinct_keys(path)[1]
    dim = max(1, int(TRACE_FAST_BYTES / (TRACE_SHARE * rows)) // 4 - 32)
    return {"rows": rows, "dim": dim, "ids": TRACE_IDS, "loads": [str(path)], "fast_bytes": TRACE_FAST_BYTES}


def measure(
    ways: Sequence[str], setting: dict[str, Any], limit_bytes: int, chosen: Sequence[str] | None, directory: Path
) -> dict[str, dict[str, Any]]:
    """Run and show all ways of one table."""
    print(
        f"{setting['rows']:,} rows of {setting['dim']:,} float32 ({setting['rows'] * setting['dim'] * 4 / 2**30:.1f} "
        f"GiB), {setting['ids']:,} ids a step, {limit_bytes >> 20:,} MiB for a process; load of the machine "
        f"{os.getloadavg()[0]:.1f}",
        flush=True,
    )
    answers: dict[str, dict[str, Any]] = {}
    for together in ([way for way in ways if way in OF_FLEXD], *([way] for way in ways if way not in OF_FLEXD)):
        if not together:
            continue
        of_ways = dict(setting)
        if together == ["memory map"] and not chosen and TARGETS_AT in setting["loads"]:
            of_ways["loads"] = [TARGETS_AT]
        answers |= run(together, of_ways, None if together == ["all fast"] else limit_bytes, directory)
        first = answers[together[0]]
        if together[0] == "flexd, run-ahead" and "error" not in first:
            setting["covers"] = {
                load: (answer["dense_seconds"], answer["dense_products"])
                for load, answer in first.items()
                if load in setting["loads"] and "dense_seconds" in answer
            }
        for way in together:
            show(way, answers[way], answers.get("all fast", {}))
    return answers


def show(way: str, answers: dict[str, Any], all_fast: dict[str, Any]) -> None:
    if "error" in answers:
        print(f"{way:<18}failed: {answers['error']}", flush=True)
        return
    for zipf, answer in answers.items():
        if not isinstance(answer, dict) or zipf == "disk":
            continue
        words = [f"{answer['step_seconds'] * 1e3:9.1f} ms a step ({answer['steps']} after {answer['warm_steps']})"]
        words.append(f"{answer['processor_seconds'] * 1e3:.0f} ms of processor time")
        if way != "all fast":
            read, written = answer["disk_bytes_read"], answer["disk_bytes_written"]
            words.append(f"disk: {read / 1e6:.1f} MB read, {written / 1e6:.1f} MB written")
        if answer.get("used"):
            words.append(f"misses {answer['missed'] / answer['used']:.3f} with {answer['frames']:,} frames")
            words.append(f"waited {answer['slow_seconds'] * 1e3:.0f} ms for the disk")
        if "dense_products" in answer:
            words.append(
                f"with a dense part of {answer['dense_seconds'] * 1e3:.0f} ms: of a device "
                f"{answer['device_step_seconds'] * 1e3:.1f} ms, of {answer['dense_products']:,} products "
                f"{answer['processor_step_seconds'] * 1e3:.1f} ms"
            )
        if zipf in all_fast and way != "all fast":
            words.append(f"{answer['step_seconds'] / all_fast[zipf]['step_seconds']:.2f} of all fast")
        print(f"{way:<18}{named(zipf):<10} " + "; ".join(words), flush=True)
    if "disk" in answers:
        print(f"{'':<18}disk: " + "; ".join(f"{name} {value:,.1f}" for name, value in answers["disk"].items()))
        for zipf, share in disk_shares(answers).items():
            print(f"{'':<18}{named(zipf):<10} {share:.2f} of the disk's best while a step waits for it", flush=True)


def named(load: str) -> str:
    """Return the name of an exponent or of a trace."""
    return Path(load).stem if load.endswith(".npz") else f"Zipf {load}"


def disk_shares(answers: dict[str, Any]) -> dict[str, float]:
    """Return by exponent the blocks read a second of waiting over the most random reads a second.

    Rows are written behind, in large calls: what they take of the disk is not counted.
    """
    best = max(value for name, value in answers["disk"].items() if name.startswith("reads a second"))
    shares = {}
    for zipf, answer in answers.items():
        if isinstance(answer, dict) and answer.get("slow_seconds"):
            shares[zipf] = answer["bytes_read"] / answers["disk"]["block_bytes"] / answer["slow_seconds"] / best
    return shares


def checks_of(answers: dict[str, dict[str, Any]], counted: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return the checks of measured ways, and of misses counted by exponent."""
    checks = []
    measured = {way: answer for way, answer in answers.items() if "error" not in answer}

    def figure(way: str, zipf: str, name: str) -> float | None:
        value = measured.get(way, {}).get(zipf, {}).get(name)
        return None if value is None else float(value)

    loads = [load for answer in measured.values() for load, found in answer.items() if isinstance(found, dict)]
    zipfs = [load for load in dict.fromkeys(loads) if load != "disk"]
    for zipf in zipfs:
        ours = figure("flexd", zipf, "step_seconds")
        for peer, least in (("memory map", 20.0), ("RocksDB", 2.0)):
            theirs = figure(peer, zipf, "step_seconds")
            if zipf == TARGETS_AT and ours and theirs:
                ratio = theirs / ours
                checks.append(check(f"Zipf {zipf}: {peer} / flexd", ratio, f">= {least:g}", ratio >= least))
        behind, fast = (figure(way, zipf, "device_step_seconds") for way in ("flexd, run-ahead", "all fast"))
        if behind and fast:
            ratio = behind / fast
            checks.append(check(f"{named(zipf)}: run-ahead / all fast, dense part", ratio, "<= 1.1", ratio <= 1.1))
    if "disk" in measured.get("flexd", {}):
        for zipf, share in disk_shares(measured["flexd"]).items():
            checks.append(check(f"{named(zipf)}: share of the disk's limit", share, ">= 0.9", share >= 0.9))
    for zipf, by_policy in counted.items():
        for prefix in ("", "moved: "):
            ratio = by_policy[f"{prefix}flexd"] / by_policy[f"{prefix}LRU"]
            checks.append(check(f"Zipf {zipf}: {prefix}misses / LRU's", ratio, "< 1", ratio < 1))
            ratio = by_policy[f"{prefix}flexd, {AHEAD} ahead"] / by_policy[f"{prefix}Belady"]
            name = f"Zipf {zipf}: {prefix}misses with {AHEAD} batches known / Belady's"
            checks.append(check(name, ratio, "<= 1.25", ratio <= 1.25))
    return checks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=25_200_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ids", type=int, default=25_600, help="look-ups a step")
    parser.add_argument("--zipf", type=float, nargs="+", help="exponents (default: 0.9 1.05 1.2; --quick: 1.05)")
    parser.add_argument("--trace", type=Path, nargs="+", default=[], metavar="FILE.npz", help="instead of Zipf's law")
    parser.add_argument("--limit-mib", type=int, default=1536)
    parser.add_argument("--no-dense", action="store_true", help="measure without a dense part alone")
    parser.add_argument("--warm-seconds", type=float, default=4.0, help="before each measurement")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured of each way and exponent")
    parser.add_argument("--counted-steps", type=int, default=800, help="of the misses that are counted; 0: none")
    parser.add_argument("--only", nargs="+", choices=WAYS, metavar="WAY")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="300,000 rows of 64, 2,560 ids, 512 MiB, a second each")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if not given.directory.is_dir():
        parser.error(f"--directory {given.directory}: no such directory")
    zipfs = [] if given.trace else given.zipf or ([1.05] if given.quick else [0.9, 1.05, 1.2])
    if 1.0 in zipfs:
        parser.error("--zipf 1: give 0.999 or 1.001")
    if given.quick:
        given.rows, given.dim, given.ids, given.limit_mib = 300_000, 64, 2_560, 512
        given.warm_seconds, given.seconds, given.counted_steps = 0.5, 1.0, min(given.counted_steps, 40)
    limit = (TRACE_LIMIT_MIB if given.trace else given.limit_mib) << 20
    shared = {
        "traces": bool(given.trace), "dense": not given.no_dense, "covers": {},
        "warm_seconds": given.warm_seconds, "seconds": given.seconds, "disk_seconds": 0.2 if given.quick else 2.0,
    }  # fmt: skip
    drawn = {
        "rows": given.rows, "dim": given.dim, "ids": given.ids, "loads": [f"{zipf:g}" for zipf in zipfs],
        "fast_bytes": (16 << 20) if given.quick else int(limit * FAST_SHARE),
    }  # fmt: skip
    ways = [way for way in WAYS if way in (given.only or WAYS) and not (given.trace and way == "flexd, static")]
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    if "RocksDB" in ways and importlib.util.find_spec("rocksdict") is None:
        ways.remove("RocksDB")
        print("not run: RocksDB (pip install rocksdict)")
    answers: dict[str, dict[str, Any]] = {}
    for setting in [of_trace(path) for path in given.trace] or [drawn]:
        for way, answer in measure(ways, setting | shared, limit, given.only, given.directory).items():
            answers.setdefault(way, {}).update(answer)
    counted: dict[str, dict[str, float]] = {}
    for zipf in zipfs if given.counted_steps else ():
        counted[f"{zipf:g}"] = misses(given.rows, given.ids, zipf, given.counted_steps)
        words = "  ".join(f"{policy} {value:.3f}" for policy, value in counted[f"{zipf:g}"].items())
        print(
            f"misses a distinct row, 1/{ROWS_DIVIDED} of the rows, 1/{IDS_DIVIDED} of the ids, Zipf {zipf:g}: {words}",
            flush=True,
        )
    print(f"load of the machine at the end {os.getloadavg()[0]:.1f}")
    checks = [] if given.quick else checks_of(answers, counted)
    failed = [way for way, answer in answers.items() if "error" in answer]
    code = ending({"ways": answers, "misses": counted}, checks, as_json=given.json)
    return 1 if failed else code


if __name__ == "__main__":
    sys.exit(main())
