"""Forward decay: weights against the formula, and the clock's rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings

TABLE = [TableSpec("t", 8, 4)]
T0 = 1.7e9


def _set(half_life: float | None = 10.0, max_future: float = 1e9, **more) -> SketchSet:
    return SketchSet(TABLE, SketchSettings(2**20, half_life, max_future, **more))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.floats(0, 400)), min_size=1, max_size=40),
    st.sampled_from([7.3, 60.0, 3600.0]),
)
def test_counters_follow_the_formula_whatever_the_order(events, half_life):
    sketches = _set(half_life)
    newest = T0 + max(time for _, time in events)
    sketches.ingest("t", np.array([0], dtype=np.int32), 0, newest)
    sketches.ingest("t", np.array([0], dtype=np.int32), 0, newest + 1e-6)
    exact = np.zeros(8)
    exact[0] = 2
    for row, time in events:
        counts = sketches.ingest("t", np.array([row], dtype=np.int64), 0, T0 + time)
        assert counts.late == (T0 + time < newest + 1e-6 - 60)
        assert counts.accepted == 1
        exact[row] += 2.0 ** ((T0 + time - newest) / half_life)
    got = sketches.query("t", np.arange(8))
    # Rounding: half a unit per access (2^-17 of one), and a unit for rescaling.
    assert np.allclose(got, exact, rtol=1e-5, atol=(len(events) + 2) * 2.0**-16)


HALF_LIFE, ALLOWANCE = 600.0, 300.0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 400),
            st.one_of(
                st.tuples(st.just("honest"), st.floats(0, 30)),
                st.tuples(st.just("wrong"), st.floats(0, 1e11)),
                st.tuples(st.just("near"), st.floats(-1000, 1000)),
                st.tuples(st.just("limit"), st.just(0.0)),
            ),
        ),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([8, 3_000_000]),
)
def test_no_messages_reduce_honest_counts_by_more_than_the_decay_over_the_allowance(events, rows):
    """Honest accesses are dated up to 30 s before their arrival. Other messages are dated anyhow, and of other rows."""
    sketches = SketchSet([TableSpec("t", rows, 4)], SketchSettings(2**20, HALF_LIFE, ALLOWANCE))
    now, honest = T0, []
    for passed, (kind, value) in events:
        now += passed
        if kind == "limit":
            sketches.limit_clock(now)
            continue
        dated = {"honest": now - value, "wrong": value, "near": now + value}[kind]
        honest += [dated] if kind == "honest" else []
        sketches.ingest("t", np.full(64, kind == "honest", np.int32), 0, dated, None, now)
    assert not sketches.newest_event_seconds > now + ALLOWANCE
    exact = 64 * sum(2.0 ** ((dated - now) / HALF_LIFE) for dated in honest)
    least = exact * 2.0 ** (-ALLOWANCE / HALF_LIFE)
    got = sketches.query("t", np.array([1]))[0]
    assert got >= least * (1 - 1e-4) - (len(events) + 2) * 64 * 2.0**-14


def test_a_time_that_is_not_finite_is_refused_and_nothing_counted():
    sketches = _set()
    for time in (math.nan, math.inf, -math.inf):
        with pytest.raises(SketchError):
            sketches.ingest("t", np.array([1], dtype=np.int32), 0, time)
    assert sketches.samples == 0
    assert math.isnan(sketches.newest_event_seconds)


def test_counts_of_a_clock_that_was_years_ahead_stay_finite() -> None:
    """The machine's clock was set back, and nothing has arrived since."""
    sketches = _set(10.0)
    sketches.ingest("t", np.array([1, 1, 2]), 0, T0)
    sketches.limit_clock(1000.0 - 1e9)
    (table,) = sketches.profile(100.0).tables
    assert np.isfinite([table.weight, table.accesses_per_step]).all()
    assert table.hot_share.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert np.isfinite(sketches.query("t", np.arange(8))).all()


def test_late_is_what_is_older_than_the_allowance() -> None:
    sketches = _set(late_after_seconds=5.0)
    one = np.zeros(3, dtype=np.int64)
    assert sketches.ingest("t", one, 0, T0).late == 0
    assert sketches.ingest("t", one, 0, T0 + 20).late == 0
    assert sketches.ingest("t", one, 1, T0 + 15).late == 0, "ranks interleave"
    assert sketches.ingest("t", one, 1, T0 + 14.9).late == 3
    assert _set(late_after_seconds=0.0).ingest("t", one, 0, T0).late == 0
