"""Measure the cost of row migrations to the steps of running ranks, in time and in memory.

Four gloo ranks (2 x 2) train on one machine while rows are promoted to every rank and demoted again. A thread of each
rank offers the chunks to its inbox as the control agent does, each in its own time and a window ahead; the network of
the control channel is left out. Stretches with and without migration take turns in one run, and the rows that move are
not looked up: so steps differ by the migration alone. Two figures of a step: wall time (the slowest rank's), and
processor seconds of all ranks together, which other work on the machine disturbs less.

Memory is the growth of each rank's peak resident size over the stretches with migrations, against what the collection
states (``EmbeddingCollection.memory``).
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import numpy as np

from flexd.core.placement import Delta
from flexd.embedding.collection import EmbeddingCollection
from tools.bench.harness import Outcome, at_most, peak_resident_bytes, reset_peak, resident_bytes
from tools.bench.ranks import on_ranks

NODES, LOCAL_RANKS = 2, 2
HOT_ROWS = 200_000
"""Looked up; the rows that move stand behind them."""
CHUNK_ROWS, WINDOW_CHUNKS = 4096, 8
"""As the daemon's defaults; fewer rows where they would be more than the cap."""
DEFAULT_CAP = int(signature(EmbeddingCollection).parameters["max_migration_bytes_per_step"].default)
M_MMAP_THRESHOLD = -3
"""Of ``mallopt(3)``."""


@dataclass(frozen=True)
class Case:
    """One cap; ``rounds`` promotions and demotions of all ``moving_rows``, with still stretches between."""

    cap_bytes: int
    moving_rows: int
    rounds: int
    still_steps: int
    ids: int
    dim: int


def _offer(collection: EmbeddingCollection, first_version: int, chunks: list[Delta]) -> threading.Thread:
    """The agent's thread: a window of chunks ahead of what is applied."""

    def run() -> None:
        for version, chunk in enumerate(chunks, first_version):
            while version - collection.placement_version > WINDOW_CHUNKS:
                if not collection.engine.inbox.prepare_next():
                    time.sleep(0.005)
            collection.engine.inbox.offer(version, chunk)
        while collection.placement_version < first_version + len(chunks) - 1:
            if not collection.engine.inbox.prepare_next():
                time.sleep(0.005)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _case(case: Case) -> dict[str, Any]:
    """Measure one rank: per stretch (kind, [wall seconds of each step], CPU seconds per step, apply seconds)."""
    import torch

    import flexd

    rows = HOT_ROWS + case.moving_rows
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", rows, case.dim)], optimizer=flexd.RowWiseAdagrad(lr=0.1),
        layout=flexd.RankLayout(NODES, LOCAL_RANKS), replica_slots=[case.moving_rows],
        max_migration_bytes_per_step=case.cap_bytes, exchange="chain",
    )  # fmt: skip
    rng = np.random.default_rng([7, int(os.environ["RANK"])])
    ranked = np.cumsum(1 / np.arange(1, HOT_ROWS + 1) ** 1.05)
    batches = [torch.from_numpy(np.searchsorted(ranked, rng.random(case.ids) * ranked[-1])) for _ in range(8)]
    moving = np.arange(HOT_ROWS, rows, dtype=np.int64)
    home, device = np.zeros(len(moving), np.uint8), np.full(len(moving), 2, np.uint8)
    directions = {"promote": Delta(moving, home, device), "demote": Delta(moving, device, home)}
    version = step = 0
    stretches: list[dict[str, Any]] = []

    def train(kind: str, until_version: int, steps: int) -> None:
        nonlocal step
        walls: list[float] = []
        cpu, applied = time.process_time(), collection.engine.apply_seconds
        begun = time.perf_counter()
        while len(walls) < steps or collection.placement_version < until_version:
            started = time.perf_counter()
            ids = batches[step % len(batches)]
            out = collection({"item": flexd.Jagged(ids, torch.tensor([len(ids)]))})
            out["item"].values.square().sum().backward()
            collection.optimizer.step()
            walls.append(time.perf_counter() - started)
            step += 1
        stretches.append(
            {
                "kind": kind, "walls": walls, "seconds": time.perf_counter() - begun,
                "cpu": (time.process_time() - cpu) / len(walls),
                "apply": (collection.engine.apply_seconds - applied) / len(walls),
            }
        )  # fmt: skip

    train("warm", 0, 5)
    stretches.clear()
    train("empty", 0, case.still_steps)
    reset_peak()
    before = resident_bytes()
    for _ in range(case.rounds):
        for kind, delta in directions.items():
            chunks = list(delta.chunks(min(CHUNK_ROWS, case.cap_bytes // collection.engine.stores[0].row_bytes)))
            feeder = _offer(collection, version + 1, chunks)
            version += len(chunks)
            train(kind, version, 1)
            feeder.join()
            train("full" if kind == "promote" else "empty", 0, case.still_steps)
    memory = collection.memory()
    return {
        "stretches": stretches, "peak_growth": peak_resident_bytes() - before,
        "stated_growth": memory.replica_bytes + memory.max_directory_bytes + memory.max_migration_bytes,
    }  # fmt: skip


def _cases(cases: list[Case]) -> list[dict[str, Any]]:
    """Measure all cases in the same processes: what the allocators keep grows in the first."""
    return [_case(case) for case in cases]


def _memory_of_cases(cases: list[Case]) -> list[dict[str, Any]]:
    """Measure all cases with an allocator that gives tensors back at once (and is slower): its free lists, which grow
    by chance, are not the migrations' memory."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 2**10)
    return _cases([replace(case, rounds=1, still_steps=5) for case in cases])


def ratio(by_kind: dict[str, list[float]]) -> float:
    """While rows are promoted against still: the mean of before and after, because the replicas that are there already
    cost each step their synchronisation, migrations or not."""
    before, during, after = (statistics.median(by_kind[kind]) for kind in ("empty", "promote", "full"))
    return 2 * during / (before + after)


def figures(case: Case, of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one case, times in milliseconds."""
    walls: dict[str, list[float]] = {"empty": [], "promote": [], "full": [], "demote": []}
    cpu: dict[str, list[float]] = {kind: [] for kind in walls}
    p99: dict[str, list[float]] = {kind: [] for kind in walls}
    apply, seconds, steps = [], [], []
    for stretch in zip(*(rank["stretches"] for rank in of_ranks), strict=True):
        kind = stretch[0]["kind"]
        slowest = np.max([part["walls"] for part in stretch], axis=0) * 1e3
        walls[kind] += slowest.tolist()
        p99[kind].append(float(np.percentile(slowest, 99)))
        cpu[kind].append(sum(part["cpu"] for part in stretch) * 1e3)
        if kind == "promote":
            apply.append(max(part["apply"] for part in stretch) * 1e3)
            seconds.append(stretch[0]["seconds"])
            steps.append(len(stretch[0]["walls"]))
    return {
        "cap_mib": case.cap_bytes / 2**20,
        "rows": case.moving_rows,
        "steps_to_promote": statistics.median(steps),
        "seconds_to_promote": statistics.median(seconds),
        "step_median_ms": {kind: statistics.median(values) for kind, values in walls.items()},
        "step_p99_ms": {kind: float(np.percentile(values, 99)) for kind, values in walls.items()},
        "step_p99_of_stretches_ms": {kind: statistics.median(values) for kind, values in p99.items()},
        "step_cpu_ms": {kind: statistics.median(values) for kind, values in cpu.items()},
        "apply_ms": statistics.median(apply),
        "p99_ratio": ratio(p99),
        "median_ratio": ratio({kind: [statistics.median(values)] for kind, values in walls.items()}),
        "cpu_ratio": ratio(cpu),
    }


def memory_figures(of_ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of one case, of the rank with the most."""
    return {
        f"{kind}_growth_mib": max(rank[f"{kind}_growth"] for rank in of_ranks) / 2**20 for kind in ("peak", "stated")
    }


def section(options: Namespace) -> Outcome:
    rows = 60_000 if options.quick else 1_000_000
    caps = (DEFAULT_CAP, 4 * 2**20) if options.quick else (2**19, 2**20, DEFAULT_CAP, 4 * 2**20, 16 * 2**20)
    still, ids = (15, 6_000) if options.quick else (50, 25_600)
    cases = [Case(cap, rows, 2 if cap == DEFAULT_CAP else 1, still, ids, 64) for cap in sorted(set(caps))]
    by_rank = on_ranks(_cases, NODES, LOCAL_RANKS, cases, seconds=3600)
    memory_by_rank = on_ranks(_memory_of_cases, NODES, LOCAL_RANKS, cases, seconds=3600)
    table = {
        f"cap {case.cap_bytes / 2**20:g} MiB": figures(case, list(of_ranks)) | memory_figures(memory_of_ranks)
        for case, of_ranks, memory_of_ranks in zip(
            cases, zip(*by_rank, strict=True), zip(*memory_by_rank, strict=True), strict=True
        )
    }
    default = table[f"cap {DEFAULT_CAP / 2**20:g} MiB"]
    grown = max(line["peak_growth_mib"] - line["stated_growth_mib"] for line in table.values())
    checks = [
        at_most("p99 of a step while rows migrate, default cap", default["p99_ratio"], 1.1),
        at_most("peak memory over stated, MiB", grown, 0),
    ]
    return Outcome(table, checks)


SECTIONS = {"caps": section}
