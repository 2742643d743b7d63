"""Tables counted by a count-min: a coarser unit when crowded, and 10^9 rows within a small budget."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.keyspace import TableSpec
from flexd.core.layout import RankLayout
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings
from tests.support.count_min import cell_values


def test_a_crowded_decayed_count_min_takes_a_coarser_unit():
    sketches = SketchSet([TableSpec("t", 10**6, 4)], SketchSettings(400_000, 1000.0, 1e9, 100, logarithmic=False))
    table = sketches._tables["t"].sketch
    rows = np.zeros(1, dtype=np.int64)
    sketches.ingest("t", rows, 0, 1.7e9)
    before, counter = table.exponent, table._counter
    width = 1 << counter.log2_width
    # As after a long stream: every fourth cell holds twice the maximum of a word, in a pair with the next.
    words = np.zeros((4, width), dtype=np.uint32)
    words[:, ::4], words[:, 1::4] = 2**31, 2**31 | 2
    counter.load(words.reshape(-1), 2**40)
    assert (cell_values(counter)[:, ::4] == 2**32).all()
    assert counter.joined_share == 0.5
    weight = 2**32 * sketches._decay.unit_weight(before)
    sketches.ingest("t", rows, 0, 1.7e9)
    assert table.exponent > before
    assert table.access_units(1.7e9, sketches._decay) >= 2**8
    assert table._counter.joined_share <= 1 / 8
    cells = cell_values(counter).astype(float) * sketches._decay.unit_weight(table.exponent)
    assert np.allclose(cells[:, ::4], weight, rtol=1e-3, atol=2.0)
    assert sketches.nbytes <= sketches.choices()[0].bytes


ROWS = 10**9
MEMORY = 16 * 2**20


def test_a_billion_rows_are_profiled_within_the_budget() -> None:
    """Hot rows among uniform accesses are listed within their bounds, and memory stays within the budget."""
    sketches = SketchSet([TableSpec("huge", ROWS, 64)], SketchSettings(MEMORY, None, max_hot_rows=20_000))
    (choice,) = sketches.choices()
    assert choice.kind == "count_min"
    assert choice.bytes <= MEMORY
    rng = np.random.default_rng(0)
    hot = rng.choice(ROWS, 2_000, replace=False)
    hot[:2] = 0, ROWS - 1
    weights = np.arange(1, 2_001) ** -0.8
    counts = np.zeros(2_000, np.int64)
    for message in range(120):
        picked = rng.choice(2_000, 4_096, p=weights / weights.sum())
        counts += np.bincount(picked, minlength=2_000)
        rows = np.concatenate([hot[picked], rng.integers(0, ROWS, 4_096)])
        sketches.ingest("huge", rows, message % 4, 1.0 + message)
        assert sketches.nbytes <= MEMORY
    total = 120 * 8_192
    (table,) = sketches.profile(1e6, layout=RankLayout(2, 2)).tables
    assert table.weight == total
    at = np.argsort(table.hot_rows)
    found = at[np.minimum(np.searchsorted(table.hot_rows[at], hot), len(at) - 1)]
    listed = table.hot_rows[found] == hot
    assert listed[np.argsort(-counts)[:1_000]].all(), "the thousand hottest are all listed"
    true_share = counts[listed] / total
    found = found[listed]
    assert (table.hot_upper[found] >= true_share - 1e-12).all()
    assert (table.hot_lower[found] <= true_share + 1e-12).mean() > 0.95
    assert table.hot_share[found] == pytest.approx(true_share, rel=0.1, abs=8 / total)
    assert table.coverage > 0.95
    assert table.distinct_rows == pytest.approx(2_000 + 120 * 4_096, rel=0.08)
    listed_and_binned = len(table.hot_rows) + table.bin_rows.sum()
    assert listed_and_binned <= ROWS
    assert listed_and_binned == pytest.approx(table.distinct_rows, rel=0.35)
