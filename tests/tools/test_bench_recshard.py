"""RecShard's comparison: what is counted, for placements that stay and for frames."""

from __future__ import annotations

import numpy as np

from tools.bench.peers.recshard_tables import LAYOUT, Tables
from tools.bench.planning import made_up_tables
from tools.bench.sections.recshard import (
    Frames,
    Static,
)  # fmt: skip

TABLES = Tables.of([table for table in made_up_tables(12) if table.bags > 0], 20_000.0)


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
