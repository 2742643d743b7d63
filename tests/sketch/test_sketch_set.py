"""The sketches of all tables together: counts, profiles, merging, state."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.keyspace import TableSpec
from flexd.sketch.sketch_set import AccessCounts, SketchSet
from flexd.sketch.types import SketchSettings

SMALL, LARGE = TableSpec("small", 300, 4), TableSpec("large", 400_000, 4)
TABLES = [SMALL, LARGE]
MEMORY = 1_000_000
T0 = 1.7e9


def _set(half_life: float | None = 50.0, max_hot_rows: int = 500) -> SketchSet:
    sketches = SketchSet(TABLES, SketchSettings(MEMORY, half_life, 1e9, max_hot_rows, logarithmic=False))
    assert [choice.kind for choice in sketches.choices()] == ["dense", "count_min"]
    return sketches


def _batches(seed: int, count: int = 20) -> list[tuple[str, np.ndarray, float]]:
    random = np.random.default_rng(seed)
    batches = []
    for i in range(count):
        table = TABLES[i % 2]
        rows = (random.zipf(1.3, 3000) % (table.rows + 20)).astype([np.int32, np.int64][i % 3 % 2]) - 5
        batches.append((table.name, rows, T0 + 10.0 * i + random.normal()))
    return batches


def _feed(sketches: SketchSet, batches: list[tuple[str, np.ndarray, float]]) -> AccessCounts:
    ranks = (len(rows) * 7 % 5 for _, rows, _ in batches)
    return sum(
        (sketches.ingest(t, rows, rank, time) for (t, rows, time), rank in zip(batches, ranks, strict=True)),
        AccessCounts(),
    )


def _exact(batches: list[tuple[str, np.ndarray, float]], half_life: float | None) -> dict[str, np.ndarray]:
    newest = max(time for _, _, time in batches)
    exact = {table.name: np.zeros(table.rows) for table in TABLES}
    for table, rows, time in batches:
        counted = rows[(rows >= 0) & (rows < len(exact[table]))]
        weight = 1.0 if half_life is None else 2.0 ** ((time - newest) / half_life)
        exact[table] += weight * np.bincount(counted, minlength=len(exact[table]))
    return exact


@pytest.mark.parametrize("half_life", [None, 50.0])
def test_profile_against_exact_counts(half_life):
    batches = _batches(1, 60)
    sketches = _set(half_life)
    counts = _feed(sketches, batches)
    exact = _exact(batches, half_life)
    assert counts.accepted == sketches.samples
    profile = sketches.profile({"small": 11.0}, generation=7, lag_messages=3)
    assert (profile.generation, profile.lag_messages, profile.samples) == (7, 3, counts.accepted)
    assert profile.event_time_seconds == max(time for _, _, time in batches)
    small, large = profile.tables
    idle = sketches.profile(idle_seconds=10.0)
    assert idle.event_time_seconds == profile.event_time_seconds + 10.0
    factor = 1.0 if half_life is None else 2.0 ** (-10.0 / half_life)
    assert [t.weight for t in idle.tables] == pytest.approx([factor * t.weight for t in profile.tables])
    assert sketches.profile(idle_seconds=-1.0).event_time_seconds == profile.event_time_seconds
    zero = np.zeros(1, np.int64)
    assert sketches.query("small", zero, 10.0) == pytest.approx(factor * sketches.query("small", zero))
    assert (small.accesses_per_step, large.accesses_per_step) == (11.0, 0.0)
    for table in profile.tables:
        truth = exact[table.table]
        share = truth / truth.sum()
        at = share[table.hot_rows]
        tolerance = 1e-4 * at.max()
        assert (table.hot_lower <= at + tolerance).mean() > 0.97
        assert (table.hot_upper >= at - tolerance).all()
        assert np.isin(np.argsort(-truth)[:20], table.hot_rows).all()
        assert table.coverage == pytest.approx(1.0, abs=0.05)
    assert np.array_equal(small.hot_lower, small.hot_upper)
    assert small.distinct_rows == (exact["small"] > 0).sum()
    assert large.distinct_rows == pytest.approx((exact["large"] > 0).sum(), rel=0.1)


def test_every_access_is_counted_by_outcome():
    sketches = _set()
    rows = np.array([-1, 0, 299, 300, -(2**60), 2**60], dtype=np.int64)
    assert sketches.ingest("small", rows, 0, T0) == AccessCounts(accepted=2, negative_row=2, row_out_of_range=2)
    assert sketches.ingest("other", rows, 0, T0 + 1e9) == AccessCounts(unknown_table=6)
    assert sketches.newest_event_seconds == T0, "an unknown table does not move the clock"
    edges = np.array([-1, 0, LARGE.rows - 1, LARGE.rows], dtype=np.int32)
    got = sketches.ingest("large", edges, 0, T0 - 1)
    assert got == AccessCounts(accepted=2, negative_row=1, row_out_of_range=1)
    assert sketches.ingest("small", np.empty(0, dtype=np.int64), 0, T0) == AccessCounts()
    assert sketches.samples == 4
