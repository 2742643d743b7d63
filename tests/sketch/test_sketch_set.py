"""The sketches of all tables together: counts, profiles, merging, state."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.keyspace import TableSpec
from flexd.sketch.sketch_set import AccessCounts, SketchSet
from flexd.sketch.table_sketch import SketchSettings

SMALL, LARGE = TableSpec("small", 300, 4), TableSpec("large", 400_000, 4)
TABLES = [SMALL, LARGE]
T0 = 1.7e9


def sketch_set(half_life: float | None = 50.0) -> SketchSet:
    sketches = SketchSet(TABLES, SketchSettings(1_000_000, half_life, 1e9, 500, logarithmic=False))
    assert [choice.kind for choice in sketches.choices()] == ["dense", "count_min"]
    return sketches


@pytest.mark.parametrize("half_life", [None, 50.0])
def test_a_profile_has_what_was_given_and_is_as_of_the_newest_event_or_later(half_life):
    sketches = sketch_set(half_life)
    for table in TABLES:
        sketches.ingest(table.name, np.arange(100), 0, T0)
    assert sketches.ingest("other", np.arange(6), 0, T0 + 1e6) == AccessCounts(unknown_table=6), "the clock stays"
    profile = sketches.profile({"small": 11.0}, generation=7, lag_messages=3)
    assert (profile.generation, profile.lag_messages, profile.samples) == (7, 3, 200)
    assert profile.event_time_seconds == T0
    assert [table.accesses_per_step for table in profile.tables] == [11.0, 0.0]
    assert [table.accesses_per_step for table in sketches.profile(8.0).tables] == pytest.approx([4.0, 4.0])
    idle = sketches.profile(idle_seconds=10.0)
    assert idle.event_time_seconds == T0 + 10.0
    factor = 1.0 if half_life is None else 2.0 ** (-10.0 / half_life)
    assert [table.weight for table in idle.tables] == pytest.approx([100 * factor] * 2, rel=1e-3)
    assert sketches.query("small", np.zeros(1, np.int64), 10.0) == pytest.approx(factor, rel=1e-3)
    assert sketches.profile(idle_seconds=-1.0).event_time_seconds == T0
