#!/usr/bin/env python3
"""Fast memory divided anew while a training runs, as popularity moves: time and misses of every step.

    python tools/bench_redivide.py [--quick] [--json] [--plot docs/images/fast-memory.png]

One rank trains two tables whose frames share one budget, with rows of 64 and of 128 float32 in files behind them. In
the first part 9 of 10 look-ups are of the first table, then of the second. Three ways train the same batches:

- by rows: frames in proportion to the rows, as training begins.
- planned once: divided by the use in the first part (``planner.memory.divide``), for good, as RecShard's split is.
- live: divided anew every 20 steps by the use in the steps before, where that saves 5 % of the expected misses; carried
  out between two steps by the path that a daemon's message takes (``planner.divide_fast_memory``). The use is counted
  here, in decayed counts, where the daemon has its sketches.

All ways must end with equal tables, bit for bit.

Checks: equal tables; without ``--quick`` live misses in the last quarter fewer rows than planned once, and at most 1.05
times the better of the other two, there and before the popularity moves.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_memory_job import batches
from bench_report import check, ending

import flexd
from flexd.embedding.connect import Connection
from flexd.embedding.store.slow.frame_division import frame_bytes
from flexd.planner.memory.division import divide, priced
from flexd.planner.memory.miss_curve import MissCurve
from flexd.planner.memory.proposal import LEAST_GAIN

WAYS = ("by rows", "planned once", "live")
DIMS = {"first": 64, "second": 128}
SHARE, ZIPF, POPULAR_SHARE = 0.05, 1.05, 0.9
EVERY, HALF_LIFE = 20, 10.0


class NoDaemon:
    """The agent of a connection that reports to nobody."""

    report_waiting = True

    def report(self, report: object) -> None:
        pass

    def stop(self, timeout_seconds: float) -> None:
        pass


class Use:
    """Decayed counts of the rows that steps used, by table."""

    def __init__(self, rows: int) -> None:
        self._counts = {name: np.zeros(rows) for name in DIMS}
        self._weight = 0.0

    def add(self, batch: dict[str, torch.Tensor]) -> None:
        decay = 0.5 ** (1 / HALF_LIFE)
        self._weight = self._weight * decay + 1.0
        for name, ids in batch.items():
            self._counts[name] *= decay
            self._counts[name][np.unique(ids.numpy())] += 1.0

    def curves(self, sizes: Sequence[int]) -> list[MissCurve]:
        made = []
        for counts, size in zip(self._counts.values(), sizes, strict=True):
            touches = np.sort(counts[counts > 0])[::-1] / self._weight
            made.append(MissCurve(touches, np.ones(len(touches)), len(counts), size))
        return made


def drawn(rows: int, ids: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """Batches of the two parts."""
    some = [batches(rows, count, ZIPF, seed=seed) for seed, count in enumerate((int(ids * POPULAR_SHARE), ids // 10))]
    names = list(DIMS)
    return [
        {name: next(each) for name, each in zip(names if step < steps // 2 else names[::-1], some, strict=True)}
        for step in range(steps)
    ]


def weights_of(use: Use, frames: Sequence[int], sizes: Sequence[int]) -> tuple[float, ...]:
    """Return what to divide the bytes of these frames by; () where that saves too little."""
    curves = use.curves(sizes)
    present = priced(np.array(frames), np.zeros(2, dtype=np.int64), curves, [], np.ones(2))
    planned = divide(curves, present.used_bytes, 1.0)
    if planned.misses.sum() > (1 - LEAST_GAIN) * present.misses.sum():
        return ()
    return tuple((planned.frames * np.array(sizes)).astype(float).tolist())


def train(way: str, given: Sequence[dict[str, torch.Tensor]], rows: int, fast_bytes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        collection = flexd.EmbeddingCollection(
            [flexd.EmbeddingTable(name, rows, dim) for name, dim in DIMS.items()],
            optimizer=flexd.RowWiseAdagrad(lr=0.05), layout=flexd.RankLayout(1, 1),
            fast_memory_bytes=fast_bytes, slow_memory_dir=directory,
        )  # fmt: skip
        connection = Connection(collection, NoDaemon())  # type: ignore[arg-type]
        stores = collection.engine.stores
        tiers = [store.tier for store in stores if store.tier is not None]
        sizes = [frame_bytes(store) for store in stores]
        use, divided, took, missed, frames = Use(rows), False, [], [], []
        for number, batch in enumerate(given):
            features = {name: flexd.Jagged(ids, torch.tensor([len(ids)])) for name, ids in batch.items()}
            before = sum(tier.counts.missed for tier in tiers)
            clock = time.perf_counter()
            found = collection(features)
            sum(jagged.values.square().sum() for jagged in found.values()).backward()  # type: ignore[union-attr]
            collection.optimizer.step()
            took.append(time.perf_counter() - clock)
            missed.append(sum(tier.counts.missed for tier in tiers) - before)
            frames.append([tier.frames for tier in tiers])
            use.add(batch)
            due = number % EVERY == EVERY - 1 and (way == "live" or (way == "planned once" and not divided))
            if due and (weights := weights_of(use, frames[-1], sizes)):
                collection.engine.inbox.set_frame_weights(weights)
                divided = True
        tables = [collection.gather_table(name) for name in DIMS]
        connection.close()
        collection.close()
    return {"seconds": took, "missed": missed, "frames": frames, "tables": tables}


def plot(path: Path, results: dict[str, dict[str, Any]], ids: int) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (upper, lower, frames) = plt.subplots(3, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2, 1.4))
    for way, result in results.items():
        steps = np.arange(len(result["seconds"]))
        smooth = [np.median(result["seconds"][max(0, at - 4) : at + 5]) * 1e3 for at in steps]
        upper.plot(steps, smooth, label=way, linewidth=1.4)
        lower.plot(steps, result["missed"], label=way, linewidth=1.0)
    live = np.array(results["live"]["frames"])
    frames.plot(live / live.sum(axis=1, keepdims=True), linewidth=1.4, label=list(DIMS))
    for axes, title in (
        (upper, "milliseconds a step (median of 9)"), (lower, "rows missed"), (frames, "frames of each table, live"),
    ):  # fmt: skip
        axes.axvline(len(live) / 2, color="0.7", linestyle=":")
        axes.set_ylabel(title, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    frames.set_xlabel(f"step of {ids:,} look-ups; at the dotted line popularity moves to the other table")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="of each table")
    parser.add_argument("--ids", type=int, default=8_192, help="look-ups a step")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--quick", action="store_true", help="10,000 rows, 512 ids, 120 steps")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.rows, asked.ids, asked.steps = 10_000, 512, 120
    torch.set_num_threads(1)
    given = drawn(asked.rows, asked.ids, asked.steps)
    fast_bytes = int(SHARE * asked.rows * sum(4 * dim + 4 + 64 for dim in DIMS.values()))
    results, figures, quarter = {}, {}, asked.steps // 4
    print(f"two tables of {asked.rows:,} rows, {fast_bytes / 2**20:.1f} MiB of frames, {asked.ids:,} look-ups a step")
    for way in WAYS:
        results[way] = found = train(way, given, asked.rows, fast_bytes)
        figures[way] = {
            "misses before": float(np.mean(found["missed"][quarter : 2 * quarter])),
            "misses after": float(np.mean(found["missed"][-quarter:])),
            "milliseconds before": float(np.median(found["seconds"][quarter : 2 * quarter])) * 1e3,
            "milliseconds after": float(np.median(found["seconds"][-quarter:])) * 1e3,
            "longest milliseconds": float(np.max(found["seconds"][quarter:])) * 1e3,
        }
        last = " + ".join(f"{count:,}" for count in found["frames"][-1])
        print(f"  {way:<13}" + "  ".join(f"{name} {value:,.1f}" for name, value in figures[way].items()), f" {last}")
    if asked.plot:
        plot(asked.plot, results, asked.ids)
    first = results[WAYS[0]]["tables"]
    equal = all(torch.equal(a, b) for result in results.values() for a, b in zip(first, result["tables"], strict=True))
    checks = [check("tables of all ways are equal", equal, "1", equal)]
    for when in ("misses before", "misses after"):
        others = min(figures[way][when] for way in WAYS[:2])
        ratio = figures["live"][when] / others
        checks.append(check(f"{when}, live / the better of the others", ratio, "<= 1.05", ratio <= 1.05))
    ratio = figures["live"]["misses after"] / figures["planned once"]["misses after"]
    checks.append(check("misses after, live / planned once", ratio, "< 0.8", ratio < 0.8))
    return ending(figures, checks[:1] if asked.quick else checks, as_json=asked.json)


if __name__ == "__main__":
    sys.exit(main())
