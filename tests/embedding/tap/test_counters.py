"""Counters of a tap: exact counts, and the device memory that they need."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import ConfigError
from flexd.core.keyspace import TableSpec
from flexd.embedding.tap.counters import MAX_LENGTH, TableCounter, check_memory, counter_bytes

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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=6), st.integers(2**16, 2**34))
def test_tables_are_refused_exactly_if_their_counters_exceed_the_memory(rows, max_bytes):
    tables = [TableSpec(f"t{i}", count, 4) for i, count in enumerate(rows)]
    needed = sum(8 * (count + MAX_LENGTH + 1) for count in rows)
    if needed <= max_bytes:
        check_memory(tables, max_bytes)
        return
    with pytest.raises(ConfigError) as caught:
        check_memory(tables, max_bytes)
    assert f"max_bytes={needed} " in caught.value.remedy
    refused = next(spec for spec in tables if f"table {spec.name!r}" in caught.value.message)
    assert f"needs {counter_bytes(refused.rows)} bytes" in caught.value.message
    smaller = [spec for spec in tables if spec.rows < refused.rows]
    assert sum(counter_bytes(spec.rows) for spec in smaller) <= max_bytes, "smaller tables fit"
