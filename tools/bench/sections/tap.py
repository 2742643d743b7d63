"""The cost of a tap to a training step, and what it ships compared with every id.

One process, one rank, one thread, Zipf accesses. Steps with and without a tap take turns; medians.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

import flexd
from flexd.core import tap_counts
from flexd.core.keyspace import TableSpec
from flexd.embedding.tap import TableCounter
from flexd.stream.codec import encode_arrow
from flexd.stream.types import AccessBatch
from tools.bench.harness import Outcome, check, in_turns, timed
from tools.bench.workloads import zipf_batches

ZIPF = 1.05
SEQUENCE = 200
SHIPPED_STEPS = 100


def _batches(rows: int, ids: int, count: int) -> list[torch.Tensor]:
    return [torch.from_numpy(batch) for batch in islice(zipf_batches(rows, ids, ZIPF), count)]


def _step_seconds(rows: int, dim: int, batches: list[torch.Tensor], steps: int) -> dict[str, float]:
    """Return median seconds of a step "without" and with a "tap". Both take turns in one collection, step by step: a
    collection each would differ in where its memory lies, which is more than a tap costs."""
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", rows, dim)])
    flexd.Tap(collection, interval_seconds=1e9, touch_steps=0, max_bytes=8 * rows)
    hooks = {"without": None, "tap": collection.after_lookup}
    lengths = torch.full((len(batches[0]) // SEQUENCE,), SEQUENCE)
    numbers = iter(range(10**9))

    def step(kind: str) -> float:
        collection.after_lookup = hooks[kind]
        ids = batches[next(numbers) // len(hooks) % len(batches)]

        def train() -> None:
            collection({"item": flexd.Jagged(ids, lengths)})["item"].values.sum().backward()
            collection.optimizer.step()

        return timed(train)

    found = in_turns({kind: partial(step, kind) for kind in hooks}, steps)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def _shipped(spec: TableSpec, batches: list[torch.Tensor], steps: int) -> tuple[int, int]:
    """Return the bytes of one message of the counts of ``steps`` steps, and of all their ids in the stream's format."""
    counter = TableCounter(spec, torch.device("cpu"))
    ids_bytes = 0
    for step in range(steps):
        ids = batches[step % len(batches)]
        lengths = torch.full((len(ids) // SEQUENCE,), SEQUENCE)
        counter.add(ids)
        part = AccessBatch("item", ids.numpy().astype(np.int32), 0, 1.0, lengths.numpy().astype(np.int32))
        ids_bytes += len(encode_arrow([part]))
    return len(tap_counts.encode(tap_counts.TapCounts(0, 1.0, (counter.drain(),)))), ids_bytes


def section(options: Namespace) -> Outcome:
    torch.set_num_threads(1)
    rows, ids, dim, steps = (500_000, 50_000, 32, 24) if options.quick else (5_000_000, 200_000, 64, 100)
    batches = _batches(rows, ids, 8)
    spec = TableSpec("item", rows, dim)
    step = _step_seconds(rows, dim, batches, steps)
    overhead = step["tap"] / step["without"] - 1
    # Repeated batches would compress better than a real stream.
    counts, all_ids = _shipped(spec, _batches(rows, ids, SHIPPED_STEPS), SHIPPED_STEPS)
    figures: dict[str, Any] = {
        "rows": rows, "ids_per_step": ids, "overhead_share": overhead,
        "step_ms": {kind: 1e3 * seconds for kind, seconds in step.items()},
        "bytes_of_100_steps": {"counts": counts, "ids": all_ids, "ids_to_counts": all_ids / counts},
    }  # fmt: skip
    checks = [
        check("tap: share of a step", overhead, "< 0.05", overhead < 0.05),
        check("ids / counts, bytes", all_ids / counts, "> 5", all_ids > 5 * counts),
    ]
    return Outcome(figures, checks)
