"""Accesses counted by row end up like the same accesses counted individually."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import TableSpec
from flexd.core.layout import RankLayout
from flexd.core.tap_counts import TableCounts, TapCounts
from flexd.sketch.node_sources import read_sources
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import AccessCounts, SketchSettings

SMALL, LARGE = TableSpec("small", 500, 8), TableSpec("large", 3_000_000, 8)
MEMORY = 6 * 2**20


def sketches(half_life: float | None = None) -> SketchSet:
    made = SketchSet(
        [SMALL, LARGE], SketchSettings(memory_bytes=MEMORY, half_life_seconds=half_life, logarithmic=False)
    )
    assert [choice.kind for choice in made.choices()] == ["dense", "count_min"]
    return made


def ingest_counted(sketches: SketchSet, counts: TapCounts) -> AccessCounts:
    rank, time = counts.source_rank, counts.event_time_seconds
    return sum((sketches.ingest_counted(table, rank, time) for table in counts.tables), AccessCounts())


def rows_of(table: str, ids: np.ndarray) -> TableCounts:
    rows, counts = np.unique(ids, return_counts=True)
    return TableCounts(table, rows.astype(np.int64), counts.astype(np.int64))


def zipf(seed: int, n: int, rows: int) -> np.ndarray:
    return (np.random.default_rng(seed).zipf(1.3, n) % rows).astype(np.int64)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 499), min_size=1, max_size=60), min_size=1, max_size=5))
def test_exact_tables_are_equal_bit_by_bit(parts):
    one_by_one, counted = sketches(), sketches()
    for when, part in enumerate(parts):
        ids = np.array(part, np.int64)
        a = one_by_one.ingest("small", ids, 0, float(when))
        b = ingest_counted(counted, TapCounts(0, float(when), (rows_of("small", ids),)))
        assert a == b
    state_a, state_b = one_by_one.state()[1], counted.state()[1]
    for name in ("0/low", "0/high_rows", "0/high_carries"):
        assert np.array_equal(state_a[name], state_b[name])
    assert one_by_one.samples == counted.samples


def test_counted_rows_are_never_under_estimated_in_a_count_min():
    counted, one_by_one = sketches(), sketches()
    exact = np.zeros(LARGE.rows, np.int64)
    for when in range(4):
        ids = zipf(when, 40_000, LARGE.rows)
        np.add.at(exact, ids, 1)
        ingest_counted(counted, TapCounts(0, float(when), (rows_of("large", ids),)))
        one_by_one.ingest("large", ids, 0, float(when))
    seen = np.flatnonzero(exact)
    estimates = counted.query("large", seen)
    assert (estimates >= exact[seen]).all()
    # As close as the conservative update of single accesses, within its noise.
    excess = (estimates - exact[seen]).sum(), (one_by_one.query("large", seen) - exact[seen]).sum()
    assert excess[0] <= 1.2 * excess[1] + 1000
    profile = counted.profile().tables[1]
    assert set(np.argsort(-exact)[:50].tolist()) <= set(profile.hot_rows.tolist())
    assert profile.distinct_rows == pytest.approx(len(seen), rel=0.06)
    assert profile.weight == pytest.approx(exact.sum())
    assert profile.coverage > 0.5


def test_accesses_that_cannot_be_counted_are_counted_by_reason():
    made = sketches()
    ids = np.array([1, 1, 600, 601, 601], np.int64)
    counts = ingest_counted(made, TapCounts(0, 1.0, (rows_of("small", ids), rows_of("nobody", ids))))
    assert (counts.accepted, counts.row_out_of_range, counts.unknown_table) == (2, 3, 5)
    assert made.samples == 2


@pytest.mark.parametrize(("rows", "exponent"), [(2_000, 0.0), (2_000, 1.05), (20_000, 1.05)])
def test_counts_of_nodes_with_the_same_accesses_have_no_affinity(rows, exponent):
    """The counts of two ranks in two nodes, as many accesses in each, drawn alike: the estimate is 0 in the mean."""
    popularity = np.arange(1, rows + 1.0) ** -exponent
    affinity = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        made = SketchSet([TableSpec("t", rows, 8)], SketchSettings(memory_bytes=2 * 2**20, half_life_seconds=3600.0))
        for rank in range(2):
            counts = random.multinomial(200_000, popularity / popularity.sum())
            there = np.flatnonzero(counts)
            table = TableCounts("t", there, counts[there])
            ingest_counted(made, TapCounts(rank, 1.7e9 + seed, (table,)))
        sample = made._tables["t"].sketch._sample
        sources = read_sources(sample.rows(), sample.source_ranks(), np.arange(1), RankLayout(2, 1))
        affinity.append(sources.affinity)
    standard_error = np.std(affinity) / np.sqrt(len(affinity))
    assert standard_error < 0.1
    assert abs(np.mean(affinity)) < 4 * standard_error
