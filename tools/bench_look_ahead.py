#!/usr/bin/env python3
"""Misses of fast memory in training by the number of batches that ``flexd.prefetch(depth=...)`` knows.

    python tools/bench_look_ahead.py [--trace orm_night.npz] [--share 0.05] [--quick] [--json]

One rank trains on the batches of a trace (consecutive accesses, as ``bench_frames``; without ``--trace`` on draws by
Zipf's law), with frames for a share of the rows and the others in host memory. Counted are, after the first quarter of
the steps, the misses of look-ups and the rows read from slow memory, a distinct row of a batch. A row that was never
written is missed and not read; one that left before its own update is read again. LRU's and Belady's misses are those
of the same batches one after another (``bench_frames``), without updates behind the look-ups of the next batch. All
ways must end with equal tables, bit for bit.

Checks: equal tables; four batches ahead read fewer rows than one, and miss at most 1.25 times as often as Belady.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_frames import Int64Array, Steps, keys_of, missed_by_frames
from bench_report import check, ending

import flexd
from flexd.embedding.store.slow.two_memories import FRAME_BYTES
from flexd.stream.trace import load_trace

DIM = 16
DEPTHS = (0, 1, 2, 4, 8)
"""0: without ``flexd.prefetch``."""


def train(batches: list[torch.Tensor], rows: int, frames: int, depth: int) -> dict[str, Any]:
    row_bytes = 4 * DIM + 4 + FRAME_BYTES
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", rows, DIM)], optimizer=flexd.RowWiseAdagrad(lr=0.05),
        layout=flexd.RankLayout(1, 1), fast_memory_bytes=frames * row_bytes + row_bytes // 2,
    )  # fmt: skip
    tier = collection.engine.stores[0].tier
    assert tier is not None
    given = [{"item": flexd.Jagged(ids, torch.tensor([len(ids)]))} for ids in batches]
    loop: Any = flexd.prefetch(given, collection, depth=depth) if depth else given
    counted, read, missed, used, took = len(batches) // 4, 0, 0, 0, []
    clock = time.perf_counter()
    for number, features in enumerate(loop):
        if number == counted:
            read, missed, used = tier.slow.traffic.bytes_read, tier.counts.missed, tier.counts.used
        collection(features)["item"].values.square().sum().div(2).backward()
        collection.optimizer.step()
        took.append(time.perf_counter() - clock)
        clock = time.perf_counter()
    figures = {
        "read": (tier.slow.traffic.bytes_read - read) / tier.packed_bytes / (tier.counts.used - used),
        "missed": (tier.counts.missed - missed) / (tier.counts.used - used),
        "frames": tier.frames,
        "step_milliseconds": 1e3 * float(np.median(took)),
    }
    table = collection.gather_table("item")
    collection.close()
    return {"figures": figures, "table": table}


def keys_to_train_on(trace: Path | None, batch: int, steps: int) -> Int64Array:
    if trace is not None:
        keys = keys_of(load_trace(trace))
    else:
        keys = np.random.default_rng(1).zipf(1.05, 4 * steps * batch)
        keys = keys[keys <= 200_000] - 1
    return np.unique(keys[: steps * batch], return_inverse=True)[1].astype(np.int64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, metavar="FILE.npz")
    parser.add_argument("--batch", type=int, default=2_048, help="accesses of a batch")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.05, help="of the rows: frames")
    parser.add_argument("--quick", action="store_true", help="80 steps of 4,096 accesses")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.quick:
        given.batch, given.steps = 4_096, 80
    keys = keys_to_train_on(given.trace, given.batch, given.steps)
    steps = Steps.of(keys, given.batch)
    batches = [torch.from_numpy(keys[at : at + given.batch]) for at in range(0, len(steps) * given.batch, given.batch)]
    rows = int(keys.max()) + 1
    frames = max(int(np.diff(steps.starts).max()) + 1, int(rows * given.share))
    print(
        f"{'Zipf 1.05' if given.trace is None else given.trace.stem}: {len(batches)} batches of {given.batch:,}, "
        f"{rows:,} rows, {frames:,} frames, {len(steps.rows) / len(steps):,.0f} distinct rows a batch"
    )
    lru, belady = (missed_by_frames(steps, frames, *way)[0] for way in ((0.0, 0), (20.0, len(steps) + 1)))
    figures: dict[str, Any] = {"LRU": lru, "Belady": belady}
    print(f"  LRU {lru:.3f}, Belady {belady:.3f} misses a distinct row")
    tables = []
    for depth in DEPTHS:
        done = train(batches, rows, frames, depth)
        tables.append(done["table"])
        mine = figures[f"depth {depth}"] = done["figures"]
        print(
            f"  {f'{depth} ahead' if depth else 'no prefetch':<12} {mine['missed']:.3f} missed by look-ups, "
            f"{mine['read']:.3f} read; {mine['step_milliseconds']:.1f} ms a step",
            flush=True,
        )
    equal = all(torch.equal(table, tables[0]) for table in tables)
    one, four, missed = figures["depth 1"]["read"], figures["depth 4"]["read"], figures["depth 4"]["missed"]
    checks = [
        check("tables of all depths are equal", equal, "1", equal),
        check("rows read, four ahead / one", four / one, "< 1", four < one),
        check("misses of look-ups, four ahead / Belady's", missed / belady, "<= 1.25", missed <= 1.25 * belady),
    ]
    return ending(figures, checks, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
