"""The cost of a tap to a training step, and what it ships compared with every id.

One process, one rank, one thread, Zipf accesses: of one large table, and of 100 tables with fewer ids. Steps with and
without a tap take turns; medians.
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
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.embedding.tap import RowCounter
from flexd.stream.codec import encode_arrow
from flexd.stream.types import AccessBatch
from tools.bench.harness import Outcome, check, in_turns, timed
from tools.bench.workloads import zipf_batches

ZIPF = 1.05
SEQUENCE = 200
SHIPPED_STEPS = 100


def _batches(rows: int, ids: int, count: int) -> list[torch.Tensor]:
    return [torch.from_numpy(batch) for batch in islice(zipf_batches(rows, ids, ZIPF), count)]


def _step_seconds(rows: int, dim: int, batches: list[torch.Tensor], steps: int, tables: int = 1) -> dict[str, float]:
    """Return median seconds of a step "without" and with a "tap". Both take turns in one collection, step by step: a
    collection each would differ in where its memory lies, which is more than a tap costs."""
    names = [f"item{number}" for number in range(tables)]
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable(name, rows // tables, dim) for name in names])
    flexd.Tap(collection, interval_seconds=1e9, touch_steps=0, max_bytes=8 * rows)
    hooks = {"without": None, "tap": collection.after_lookup}
    inputs = [_by_table(ids, names) for ids in batches]
    numbers = iter(range(10**9))

    def step(kind: str) -> float:
        collection.after_lookup = hooks[kind]
        given = inputs[next(numbers) // len(hooks) % len(inputs)]

        def train() -> None:
            torch.cat([rows.values for rows in collection(given).values()]).sum().backward()
            collection.optimizer.step()

        return timed(train)

    found = in_turns({kind: partial(step, kind) for kind in hooks}, steps)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def _by_table(ids: torch.Tensor, names: list[str]) -> dict[str, flexd.Jagged]:
    """Deal ids out to tables: the id i is row ``i // tables`` of table ``i % tables``."""
    found = {}
    for number, name in enumerate(names):
        rows = ids[ids % len(names) == number] // len(names)
        found[name] = flexd.Jagged(rows, torch.tensor([len(rows)]))
    return found


def _shipped(spec: TableSpec, batches: list[torch.Tensor], steps: int) -> tuple[int, int]:
    """Return the bytes of one message of the counts of ``steps`` steps, and of all their ids in the stream's format."""
    counter = RowCounter(KeySpace([spec]), torch.device("cpu"))
    ids_bytes = 0
    for step in range(steps):
        ids = batches[step % len(batches)]
        lengths = torch.full((len(ids) // SEQUENCE,), SEQUENCE)
        counter.add(ids, torch.ones_like(ids, dtype=torch.int32))
        part = AccessBatch("item", ids.numpy().astype(np.int32), 0, 1.0, lengths.numpy().astype(np.int32))
        ids_bytes += len(encode_arrow([part]))
    return len(tap_counts.encode(tap_counts.TapCounts(0, 1.0, tuple(counter.drain())))), ids_bytes


def section(options: Namespace) -> Outcome:
    torch.set_num_threads(1)
    rows, ids, dim, steps = (500_000, 50_000, 32, 24) if options.quick else (5_000_000, 200_000, 64, 100)
    batches = _batches(rows, ids, 8)
    spec = TableSpec("item", rows, dim)
    step = _step_seconds(rows, dim, batches, steps)
    overhead = step["tap"] / step["without"] - 1
    many = _step_seconds(1_000_000, 32, _batches(1_000_000, 25_600, 8), steps, tables=100)
    overhead_many = many["tap"] / many["without"] - 1
    # Repeated batches would compress better than a real stream.
    counts, all_ids = _shipped(spec, _batches(rows, ids, SHIPPED_STEPS), SHIPPED_STEPS)
    figures: dict[str, Any] = {
        "rows": rows, "ids_per_step": ids, "overhead_share": overhead,
        "step_ms": {kind: 1e3 * seconds for kind, seconds in step.items()},
        "100_tables": {
            "overhead_share": overhead_many, "step_ms": {kind: 1e3 * seconds for kind, seconds in many.items()},
        },
        "bytes_of_100_steps": {"counts": counts, "ids": all_ids, "ids_to_counts": all_ids / counts},
    }  # fmt: skip
    checks = [
        check("tap: share of a step", overhead, "< 0.05", overhead < 0.05),
        check("tap: share of a step, 100 tables", overhead_many, "< 0.05", overhead_many < 0.05),
        check("ids / counts, bytes", all_ids / counts, "> 5", all_ids > 5 * counts),
    ]
    return Outcome(figures, checks)
