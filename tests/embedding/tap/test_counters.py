"""Counters of a tap: exact counts, and the device memory that they need."""

from __future__ import annotations

import numpy as np
import torch

from flexd.core.keyspace import TableSpec
from flexd.embedding.tap.counters import MAX_LENGTH, TableCounter

ITEM = TableSpec("item", 100_000, 4)


def test_a_counter_counts_exactly_and_starts_from_zero_after_a_drain():
    counter = TableCounter(ITEM, torch.device("cpu"))
    rng = np.random.default_rng(1)
    exact = np.zeros(ITEM.rows, np.int64)
    for dtype in (torch.int64, torch.int32):
        ids = (rng.zipf(1.3, 8000) % ITEM.rows).astype(np.int64)
        np.add.at(exact, ids, 1)
        counter.add(torch.from_numpy(ids).to(dtype), torch.tensor([3000, 5000, 0]))
    counts = counter.drain()
    assert counts.table == "item"
    assert np.array_equal(counts.rows, np.flatnonzero(exact))
    assert np.array_equal(counts.counts, exact[counts.rows])
    assert counts.lengths.lengths.tolist() == [0, 3000, MAX_LENGTH]
    assert counts.lengths.counts.tolist() == [2, 2, 2]
    empty = counter.drain()
    assert empty.accesses == 0
    assert len(empty.lengths.lengths) == 0
