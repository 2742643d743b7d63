"""Shares of look-ups with a row of their own that a stream predicts from a sample of a table's sets, beside all sets.

``--trace``: its ids of table 1; else 4 million Zipf ones (1.2). Rows for an eighth of the distinct ids. The rate is of
one core.
"""

from __future__ import annotations

import time
from argparse import Namespace

import numpy as np

from flexd.sketch.id_stream import IdsSeen, IdStream
from tools.bench.harness import Outcome, at_most

MOST_OFF, BATCH, ALL_SETS = 0.02, 8_192, 2**20
SHARES = ("own_share_of_half_the_rows", "own_share", "own_share_of_twice_the_rows")


def seen(ids: np.ndarray, rows: int, **more: int) -> tuple[IdsSeen, float]:
    """Return what is seen, and million ids a second."""
    IdStream(rows, **more).add(ids[:1], 0.0)  # compiled
    stream, began = IdStream(rows, **more), time.process_time()
    for first in range(0, len(ids), BATCH):
        stream.add(ids[first : first + BATCH], float(first))
    seconds = time.process_time() - began
    return stream.seen(), len(ids) / seconds / 1e6


def section(options: Namespace) -> Outcome:
    if options.trace and not options.quick:
        read = np.load(options.trace)
        ids = read["row"][read["table"] == 1].astype(np.int64)
    else:
        ids = np.random.default_rng(0).zipf(1.2, 300_000 if options.quick else 4_000_000) % 50_000_000
    distinct = len(np.unique(ids))
    rows = distinct // 8
    sample, rate = seen(ids, rows)
    every, _ = seen(ids, rows, simulated_sets=ALL_SETS)
    off = {name: getattr(sample, name) - getattr(every, name) for name in SHARES}
    figures = {
        "million ids per second": rate, "distinct ids, of all": sample.distinct / distinct,
        **{name: getattr(sample, name) for name in SHARES},
        **{f"{name}, off": value for name, value in off.items()},
        "evictions_per_1000": sample.evictions_per_1000, "evictions_per_1000 of all sets": every.evictions_per_1000,
    }  # fmt: skip
    return Outcome(figures, [at_most("shares, off by", max(map(abs, off.values())), MOST_OFF)])
