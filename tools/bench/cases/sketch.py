"""Counting rate of one core: flexd's counters beside datasketches, numpy and the memory limit of the machine.

Medians over repeats, all in one process and one thread. accuracy: plans made from the counters,
by memory (``sections.accuracy``).
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasketches
import numba
import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import TableSpec
from flexd.sketch.count_min_kernels import cell_positions
from flexd.sketch.count_min_table import CountMinTable
from flexd.sketch.dense_table import DenseTable
from flexd.sketch.kernel_parts import prefetch
from flexd.sketch.sketch_set import SketchSet, choose, warm_up
from flexd.sketch.table_sketch import SketchSettings, TableChoice
from tools.bench.harness import Outcome, at_least, at_most, timed
from tools.bench.sections import accuracy
from tools.bench.workloads import zipf_batches

MESSAGE_IDS = 8192
UNSET_THRESHOLD = 2**62


@numba.njit(nogil=True)
def _random_add(rows: Any, counters: Any) -> None:
    """Do the least work of any counter for an id: read and write one random word, prefetched as early as in flexd."""
    last = np.uint64(rows.size - 1)
    for i in range(np.uint64(rows.size)):
        prefetch(counters, np.uint64(rows[min(i + np.uint64(96), last)]))
        counters[np.uint64(rows[i])] += np.uint32(1)


@numba.njit(nogil=True)
def _random_add_4(positions: Any, cells: Any) -> None:
    """Do the least work of a count-min for an id at known positions: read and write one word in each of 4 rows."""
    last = np.uint64(positions.shape[1] - 1)
    for i in range(np.uint64(positions.shape[1])):
        ahead = min(i + np.uint64(256), last)
        prefetch(cells, np.uint64(positions[0, ahead]))
        prefetch(cells, np.uint64(positions[1, ahead]))
        prefetch(cells, np.uint64(positions[2, ahead]))
        prefetch(cells, np.uint64(positions[3, ahead]))
        cells[positions[0, i]] += np.uint32(1)
        cells[positions[1, i]] += np.uint32(1)
        cells[positions[2, i]] += np.uint32(1)
        cells[positions[3, i]] += np.uint32(1)


def _sort_and_count(ids: npt.NDArray[np.int64], counters: npt.NDArray[np.int64]) -> None:
    rows, times = np.unique(ids, return_counts=True)
    counters[rows] += times


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    return statistics.median(timed(work) for _ in range(repeats))


def _count_min(rows: npt.NDArray[Any], table_rows: int) -> Callable[[], object]:
    choice = TableChoice("t", "count_min", 0, 0.0, 0.0, 20, 1, 1)
    table = CountMinTable(TableSpec("t", table_rows, 64), choice, 0)
    table._threshold = UNSET_THRESHOLD
    return lambda: table.add_units(rows, 1)


def _sketch_set(
    ids: npt.NDArray[Any],
    rows: int,
    memory: int,
    half_life: float | None,
    kind: str = "dense",
) -> Callable[[], object]:
    sketches = SketchSet(
        [TableSpec("t", rows, 64)], SketchSettings(memory, half_life, logarithmic=kind == "logarithmic")
    )
    assert sketches.choices()[0].kind == kind
    clock = iter(range(10**9))

    def work() -> None:
        now = 1.7e9 + next(clock)
        for i in range(0, len(ids), MESSAGE_IDS):
            sketches.ingest("t", ids[i : i + MESSAGE_IDS], 0, now + i / len(ids))

    return work


def measure(rows: int, count: int, repeats: int) -> dict[str, float]:
    """Return figures in millions of ids a second and in seconds."""
    warm_up()
    ids = next(zipf_batches(rows, count, 1.05))
    ids32 = ids.astype(np.int32)
    few = ids[: count // 20]
    peer = datasketches.count_min_sketch(4, 2**20)

    def per_item() -> None:
        for row in few.tolist():
            peer.update(row)

    spec = TableSpec("t", rows, 64)
    dense, dense32 = (DenseTable(spec, choose([spec], 2**40, 1)[0], 0) for _ in range(2))
    probe, probe_cells = np.zeros(rows, dtype=np.uint32), np.zeros(4 << 20, dtype=np.uint32)
    numpy_counters = np.zeros(rows, dtype=np.int64)
    positions = np.empty((4, count), dtype=np.uint32)
    cell_positions(ids, count, 20, positions)
    million_ids: dict[str, tuple[Callable[[], object], int]] = {
        "random_access_probe": (lambda: _random_add(ids, probe), count),
        "random_access_probe_count_min": (lambda: _random_add_4(positions, probe_cells), count),
        "numpy_sort_and_count": (lambda: _sort_and_count(ids, numpy_counters), count),
        "datasketches_count_min_per_item": (per_item, len(few)),
        "dense_int64": (lambda: dense.add_units(ids, 1), count),
        "dense_int32": (lambda: dense32.add_units(ids32, 1), count),
        "count_min_conservative": (_count_min(ids, rows), count),
        "set_dense": (_sketch_set(ids, rows, 2**30, None), count),
        "set_dense_decayed": (_sketch_set(ids, rows, 2**30, 3600.0), count),
        "set_count_min": (_sketch_set(ids, rows, 3 * rows, None, kind="count_min"), count),
        "set_count_min_decayed": (_sketch_set(ids, rows, 3 * rows, 3600.0, kind="count_min"), count),
        "set_logarithmic_3_bits": (_sketch_set(ids, rows, 2 * rows // 5, None, kind="logarithmic"), count),
        "set_logarithmic_3_bits_decayed": (_sketch_set(ids, rows, 2 * rows // 5, 3600.0, kind="logarithmic"), count),
        "set_logarithmic_8_bits": (_sketch_set(ids, rows, 2 * rows, None, kind="logarithmic"), count),
    }
    figures = {
        f"{name}_million_ids_per_second": n / _median_seconds(work, repeats) / 1e6
        for name, (work, n) in million_ids.items()
    }
    for kernel, limit in (
        ("dense_int64", "random_access_probe"),
        ("count_min_conservative", "random_access_probe_count_min"),
    ):
        figures[f"{kernel}_share_of_memory_limit"] = (
            figures[f"{kernel}_million_ids_per_second"] / figures[f"{limit}_million_ids_per_second"]
        )
    counted = SketchSet([TableSpec("t", rows, 64)], SketchSettings(2**30, 3600.0))
    counted.ingest("t", ids, 0, 1.7e9)
    figures["profile_dense_seconds"] = _median_seconds(counted.profile, repeats)
    figures["state_copy_seconds"] = _median_seconds(counted.state, repeats)
    return figures


def _checks(figures: dict[str, float]) -> list[dict[str, Any]]:
    def rate(name: str) -> float:
        return figures[f"{name}_million_ids_per_second"]

    peer = rate("datasketches_count_min_per_item")
    decay_cost = 1 - rate("set_dense_decayed") / rate("set_dense")
    at_least_ = [
        ("dense, million ids/s", rate("dense_int64"), 130.0),
        ("dense over datasketches", rate("dense_int64") / peer, 15.0),
        ("count-min 4 x 2^20 conservative, million ids/s", rate("count_min_conservative"), 60.0),
        ("count-min over datasketches", rate("count_min_conservative") / peer, 8.0),
        ("logarithmic, 3 bits, over count-min", rate("set_logarithmic_3_bits") / rate("set_count_min"), 1.0),
    ]
    at_most_ = [
        ("profile of a dense table, s", figures["profile_dense_seconds"], 0.3),
        ("extra cost of decay, dense", decay_cost, 0.15),
        ("extra cost of decay, count-min", 1 - rate("set_count_min_decayed") / rate("set_count_min"), 0.15),
    ]
    return [at_least(*each) for each in at_least_] + [at_most(*each) for each in at_most_]


def section(options: Namespace) -> Outcome:
    figures = measure(*((1_000_000, 2_000_000, 3) if options.quick else (10_000_000, 20_000_000, 5)))
    return Outcome(figures, _checks(figures))


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="accuracy of a trace (docs/demo.md) besides the Zipf streams")


SECTIONS = {"rates": section, "accuracy": accuracy.section}
