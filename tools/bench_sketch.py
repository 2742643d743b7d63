"""How fast one core counts accesses: flexd's counters beside datasketches, numpy and the machine's own limit.

    python tools/bench_sketch.py [--quick] [--json]

Medians over repeats, all in one process and one thread. The last line of ``--json`` output is
``{"figures": {...}, "checks": [{"name", "value", "target", "ok"}]}``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import datasketches
import numba
import numpy as np
import numpy.typing as npt

from flexd.keyspace import TableSpec
from flexd.sketch.countmin import CANDIDATE_BUFFER, CountMin
from flexd.sketch.dense import DenseCounter
from flexd.sketch.table_set import SketchSet, warm_up

MESSAGE_IDS = 8192
UNSET_THRESHOLD = 2**62


@numba.njit(nogil=True)
def _random_add(rows: Any, counters: Any) -> None:
    """The least any counter does for an id: read and write one word at random."""
    for i in range(rows.size):
        counters[np.uint64(rows[i])] += np.uint32(1)


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _zipf(rows: int, count: int, exponent: float) -> npt.NDArray[np.int64]:
    random = np.random.default_rng(0)
    cumulative = np.cumsum(1 / np.arange(1, rows + 1) ** exponent)
    ranks = np.searchsorted(cumulative, random.random(count) * cumulative[-1])
    return random.permutation(rows)[ranks].astype(np.int64)


def _count_min(rows: npt.NDArray[Any], table_rows: int, conservative: bool) -> Callable[[], object]:
    counter = CountMin(table_rows, 20, conservative=conservative)
    registers = np.zeros(4096, dtype=np.uint8)
    candidates = np.empty(CANDIDATE_BUFFER, dtype=np.int64)
    return lambda: counter.add(rows, 0, 1, registers, UNSET_THRESHOLD, candidates, 0)


def _sketch_set(ids: npt.NDArray[Any], rows: int, memory: int, half_life: float | None) -> Callable[[], object]:
    sketches = SketchSet([TableSpec("t", rows, 64)], memory, half_life)
    clock = iter(range(10**9))

    def work() -> None:
        now = 1.7e9 + next(clock)
        for i in range(0, len(ids), MESSAGE_IDS):
            sketches.ingest("t", ids[i : i + MESSAGE_IDS], 0, now + i / len(ids))

    return work


def measure(rows: int, count: int, repeats: int) -> dict[str, float]:
    """Figures in millions of ids a second and in seconds."""
    warm_up()
    ids = _zipf(rows, count, 1.05)
    ids32 = ids.astype(np.int32)
    few = ids[: count // 20]
    peer = datasketches.count_min_sketch(4, 2**20)

    def per_item() -> None:
        for row in few.tolist():
            peer.update(row)

    dense, dense32 = DenseCounter(rows), DenseCounter(rows)
    probe = np.zeros(rows, dtype=np.uint32)
    million_ids: dict[str, tuple[Callable[[], object], int]] = {
        "random_access_probe": (lambda: _random_add(ids, probe), count),
        "bincount": (lambda: np.bincount(ids, minlength=rows), count),
        "datasketches_count_min_per_item": (per_item, len(few)),
        "dense_int64": (lambda: dense.add(ids, 1), count),
        "dense_int32": (lambda: dense32.add(ids32, 1), count),
        "count_min_conservative": (_count_min(ids, rows, True), count),
        "count_min_plain": (_count_min(ids, rows, False), count),
        "set_dense": (_sketch_set(ids, rows, 2**30, None), count),
        "set_dense_decayed": (_sketch_set(ids, rows, 2**30, 3600.0), count),
        "set_count_min": (_sketch_set(ids, rows, 3 * rows, None), count),
        "set_count_min_decayed": (_sketch_set(ids, rows, 3 * rows, 3600.0), count),
    }
    figures = {
        f"{name}_million_ids_per_second": n / _median_seconds(work, repeats) / 1e6
        for name, (work, n) in million_ids.items()
    }
    counted = SketchSet([TableSpec("t", rows, 64)], 2**30, 3600.0)
    counted.ingest("t", ids, 0, 1.7e9)
    figures["profile_dense_seconds"] = _median_seconds(counted.profile, repeats)
    figures["state_copy_seconds"] = _median_seconds(counted.state, repeats)
    return figures


def _checks(figures: dict[str, float]) -> list[dict[str, object]]:
    def rate(name: str) -> float:
        return figures[f"{name}_million_ids_per_second"]

    peer = rate("datasketches_count_min_per_item")
    decay_cost = 1 - rate("set_dense_decayed") / rate("set_dense")
    at_least = [
        ("dense, million ids/s", rate("dense_int64"), 130.0),
        ("dense over datasketches", rate("dense_int64") / peer, 15.0),
        ("count-min 4 x 2^20 conservative, million ids/s", rate("count_min_conservative"), 60.0),
        ("count-min over datasketches", rate("count_min_conservative") / peer, 8.0),
    ]
    at_most = [
        ("profile of a dense table, s", figures["profile_dense_seconds"], 0.3),
        ("extra cost of decay", decay_cost, 0.15),
    ]
    checks = [{"name": n, "value": round(v, 4), "target": f">= {t:g}", "ok": v >= t} for n, v, t in at_least]
    return checks + [{"name": n, "value": round(v, 4), "target": f"<= {t:g}", "ok": v <= t} for n, v, t in at_most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the ids and rows, fewer repeats")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    rows, count, repeats = (1_000_000, 2_000_000, 3) if options.quick else (10_000_000, 20_000_000, 5)
    figures = measure(rows, count, repeats)
    checks = _checks(figures)
    if options.json:
        context = {"rows": rows, "ids": count, "machine": platform.machine(), "cpus": os.cpu_count()}
        rounded = {name: round(value, 4) for name, value in figures.items()}
        print(json.dumps({"figures": {**context, **rounded}, "checks": checks}))
        return
    print(f"Zipf 1.05, {rows:,} rows, {count:,} ids, median of {repeats}, one thread\n")
    for name, value in figures.items():
        print(f"{name:52s} {value:10.3f}")
    print()
    for check in checks:
        print(f"{'ok  ' if check['ok'] else 'MISS'} {check['name']}: {check['value']} (target {check['target']})")


if __name__ == "__main__":
    main()
