"""Tables with logarithmic counters: profiles, decay, merging, counted accesses."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.keyspace import TableSpec
from flexd.sketch.logarithmic_table import TOP_SHARE
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings

T0 = 1.7e9


ROWS = 200_000
TABLE = [TableSpec("t", ROWS, 4)]


def _zipf_set(memory: int, half_life: float | None = None, max_hot_rows: int = 10**6, seed: int = 0):
    sketches = SketchSet(TABLE, SketchSettings(memory, half_life, 1e9, max_hot_rows))
    assert sketches.choices()[0].kind == "logarithmic"
    random = np.random.default_rng(seed)
    exact = np.zeros(ROWS)
    for i in range(20):
        rows = random.permutation(ROWS)[:1] * 0 + random.zipf(1.15, 50_000) % ROWS
        sketches.ingest("t", rows, i % 4, T0 + 10 * i)
        weight = 1.0 if half_life is None else 2.0 ** ((10 * i - 190) / half_life)
        exact += weight * np.bincount(rows, minlength=ROWS)
    return sketches, exact


@pytest.mark.parametrize("half_life", [None, 60.0])
@pytest.mark.parametrize(("memory", "bits"), [(80_000, 3), (110_000, 4), (300_000, 8)])
def test_a_profile_lists_rows_that_exact_counts_would_list(memory, bits, half_life):
    sketches, exact = _zipf_set(memory, half_life)
    assert sketches.choices()[0].counter_bits == bits
    assert sketches.nbytes == sketches.choices()[0].bytes <= memory
    table = sketches.profile().tables[0]
    assert table.weight == pytest.approx(exact.sum(), rel=1e-3)
    assert table.hot_share.sum() + table.bin_share @ table.bin_rows <= 1 + 1e-9
    assert (np.diff(table.hot_share) <= 1e-12).all()
    assert (table.hot_lower <= table.hot_share).all()
    assert (table.hot_share <= table.hot_upper).all()
    assert len(np.unique(table.hot_rows)) == len(table.hot_rows) > 1000
    hottest = np.argsort(-exact)[:5]
    assert set(hottest.tolist()) <= set(table.hot_rows[: int(ROWS * TOP_SHARE)].tolist())
    estimates = sketches.query("t", np.arange(ROWS))
    listed = estimates[table.hot_rows] / max(estimates.sum(), table.weight)
    assert np.allclose(listed, table.hot_share, rtol=1e-6)
    # Half of the rows that are not at the top lie within the quartiles, or more where the low levels are exact.
    middle = (exact[table.hot_rows] > 0) & (table.hot_share < table.hot_share.max() / 100)
    share = exact[table.hot_rows] / exact.sum()
    within = (table.hot_lower <= share * 1.001) & (share * 0.999 <= table.hot_upper)
    assert within[middle].mean() > 0.3


def test_rows_at_the_top_level_share_the_excess_in_proportion_to_the_sample():
    sketches = SketchSet(TABLE, SketchSettings(90_000, None))
    rows = np.concatenate([np.full(60_000, 7), np.full(30_000, 8), np.arange(1000, 3000)])
    np.random.default_rng(0).shuffle(rows)
    sketches.ingest("t", rows, 0, T0)
    got = sketches.query("t", np.array([7, 8, 9]))
    assert got[:2] == pytest.approx([60_000, 30_000], rel=0.25)
    assert got[2] == 0
    assert sketches.profile().tables[0].hot_rows[:2].tolist() == [7, 8]


def test_an_idle_table_decays_by_the_formula_and_levels_stay():
    sketches, _ = _zipf_set(80_000, 60.0)
    before = sketches.query("t", np.arange(ROWS))
    levels = sketches.state()[1]["0/levels"]
    assert np.allclose(sketches.query("t", np.arange(ROWS), 120.0), before / 4)
    # Ten half-lives later, an access of another row makes the unit coarser; the levels stay.
    sketches.ingest("t", np.array([ROWS - 1]), 0, T0 + 190 + 600)
    later = sketches.state()[1]["0/levels"]
    assert (np.flatnonzero(levels != later) >= (ROWS - 1) * 3 // 8).all()
    below = np.flatnonzero(sketches._tables["t"].sketch.levels(np.arange(ROWS - 1000)) < 7)
    assert len(below) > ROWS / 2
    assert np.allclose(sketches.query("t", below), before[below] / 2**10, rtol=1e-6)
