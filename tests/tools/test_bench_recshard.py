"""RecShard's comparison: what is counted, for placements that stay and for frames."""

from __future__ import annotations

import numpy as np
import pytest

from tools.bench.peers.recshard_tables import LAYOUT, MOVED, PLANNED, Tables
from tools.bench.planning import made_up_tables
from tools.bench.sections.recshard import (
    FLEXD,
    Frames,
    Static,
    checks_of,
    replay,
    strategies,
)  # fmt: skip

TABLES = Tables.of([table for table in made_up_tables(12) if table.bags > 0], 20_000.0)
WHOLE = float(np.diff(TABLES.first) @ TABLES.stored_bytes)


def test_static_rows_count_accesses_and_frames_count_a_row_once_a_step() -> None:
    count = len(TABLES.cumulative)
    fast = np.zeros(count)
    fast[0] = 2.0
    static = Static(TABLES, np.arange(count) % LAYOUT.world_size, fast)
    rows, counts = np.array([0, 1, 2, int(TABLES.first[1])]), np.array([5, 1, 3, 4])
    rank, slow, read = static.step(rows, counts)
    assert (rank.tolist(), slow.tolist(), read.tolist()) == ([0, 0, 0, 1], [0, 0, 3, 4], [0, 0, 1, 1])
    frames = Frames(TABLES, [10_000] * len(TABLES.keyspace.groups), divides=False)
    assert frames.step(rows, counts)[1].tolist() == [1, 1, 1, 1]
    assert frames.step(rows, counts)[1].tolist() == [0, 0, 0, 0]
    assert len(set(frames.step(rows[:3], counts[:3])[0].tolist())) == 3, "neighbours have different homes"
    small = Frames(TABLES, [1] * len(TABLES.keyspace.groups), divides=False)
    for _ in range(2):
        missed = small.step(np.arange(64), np.ones(64))[1]
    assert missed.sum() > 32


def test_popularity_moves_within_its_table() -> None:
    still, moved = (list(TABLES.batches(4, 2, share, seed=3)) for share in (0.0, 1.0))
    for before, after in zip(still[:2], moved[:2], strict=True):
        assert np.array_equal(before, after)
    table = int(np.argmax(TABLES.accesses))
    low, high = TABLES.first[table], TABLES.first[table + 1]

    def first_row(batch: np.ndarray) -> float:
        return float((batch[(batch >= low) & (batch < high)] == low).mean())

    assert first_row(still[3]) == pytest.approx(first_row(still[0]), rel=0.5)
    assert first_row(moved[3]) < 0.5 * first_row(still[3])


def test_strategies_are_counted_on_the_same_batches_within_the_memory() -> None:
    memory = 0.25 * WHOLE / LAYOUT.world_size
    answer = replay(TABLES, strategies(TABLES, memory), TABLES.periods(6, 1.0))
    for periods in answer.values():
        for figures in periods.values():
            assert 0 < figures["share"] < 1
            assert figures["rows read"] <= figures["slow accesses"]
            assert figures["balance"] >= 1
    recshard = answer["recshard"]
    assert recshard[PLANNED]["slow accesses"] < min(
        answer[name][PLANNED]["slow accesses"] for name in answer if name.startswith("table_wise")
    )
    assert recshard[MOVED]["slow accesses"] > 1.2 * recshard[PLANNED]["slow accesses"]
    assert answer[FLEXD][MOVED]["slow accesses"] < 1.1 * answer[FLEXD][PLANNED]["slow accesses"]
    assert len(checks_of(answer)) == 6
