"""Accesses of a trace, a Zipf distribution or a profile, and profiles counted exactly from them."""

import numpy as np
import pytest

from flexd.core.errors import ConfigError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.simulate.accesses import (
    MAX_STEP_ACCESSES,
    exact_profile,
    profile_accesses,
    trace_accesses,
    zipf_accesses,
)
from flexd.sketch.profile import Profile, TableProfile
from flexd.stream.sample_kinds import BatchOptions
from flexd.stream.trace import synthetic_trace

LAYOUT = RankLayout(2, 2)
ROW = TableSpec("rows", 1, 16, optimizer="rowwise_adagrad")


def profile_of(weight: float = 1.0) -> Profile:
    share = np.array([0.25, 0.25])
    table = TableProfile(
        "t", 10, weight, 1.0, np.array([4, 0]), share, np.array([0.1, 0.05]), np.array([3.0, 2.0]), 7.0
    )  # fmt: skip
    return Profile((table,))


def test_a_profile_of_a_trace_is_drawn_from() -> None:
    trace = synthetic_trace(20_000, rows=900, active=300, users=200)
    accesses = trace_accesses("t", trace, LAYOUT, ROW, BatchOptions(8, 16, 8))
    assert sum(len(mine) for mine in accesses.passes(0)[0]) == 4 * 16 * 9
    seen = exact_profile([one for step in range(8) for one in accesses.passes(step)], accesses.keyspace)
    drawn = profile_accesses("p", seen, accesses.keyspace.tables, LAYOUT, accesses_per_rank=50_000, steps=4, seed=3)
    counts = np.bincount(np.concatenate(drawn.passes(1)[0]), minlength=900)
    expected = np.zeros(900)
    expected[seen.tables[0].hot_rows] = seen.tables[0].hot_share * 200_000
    # Four standard deviations of a count, for all rows at once.
    assert (np.abs(counts - expected) <= 4.5 * np.sqrt(expected) + 4).all()
    assert all(np.array_equal(a, b) for a, b in zip(drawn.passes(1)[0], drawn.passes(1)[0], strict=True))
    assert not np.array_equal(drawn.passes(1)[0][0], drawn.passes(2)[0][0])
    assert not np.array_equal(drawn.passes(1)[0][0], drawn.passes(1)[0][1])


def test_drift_moves_every_row_down_and_new_rows_in_at_the_top() -> None:
    """The hottest row of step 0 has, d places lower, the frequency of the row at rank d + 1."""
    accesses = zipf_accesses(
        RankLayout(1, 1), ROW, table_rows=500, exponent=1.0, drift_rows=2.0, accesses_per_rank=200_000,
        steps=10, seed=0,
    )  # fmt: skip
    counts = [np.bincount(accesses.passes(step)[0][0], minlength=500) for step in (0, 5)]
    places = [np.argsort(-count, kind="stable") for count in counts]
    hottest = places[0][0]
    total = (1 / np.arange(1, 501)).sum()
    assert [counts[0][hottest], counts[1][places[1][0]]] == pytest.approx([200_000 / total] * 2, rel=0.03)
    assert counts[1][hottest] == pytest.approx(200_000 / total / 11, rel=0.1)
    assert np.array_equal(accesses.passes(5)[0][0], accesses.passes(5)[0][0])


def test_rows_of_bins_are_drawn_outside_the_listed_ones() -> None:
    draws = profile_accesses(
        "p", profile_of(), [TableSpec("t", 10, 4)], RankLayout(1, 1), accesses_per_rank=100_000, steps=1, seed=0
    )
    counts = np.bincount(draws.passes(0)[0][0], minlength=10) / 100_000
    # Unlisted rows are 1, 2, 3, 5, 6, 7, 8, 9: three of bin one, two of bin two; a tenth is spread over all of them.
    expected = [0.25, 0.1125, 0.1125, 0.1125, 0.25, 0.0625, 0.0625, 0.0125, 0.0125, 0.0125]
    np.testing.assert_allclose(counts, expected, atol=0.006)


def test_accesses_that_cannot_be_drawn_are_refused() -> None:
    with pytest.raises(ConfigError, match="look-ups a sample"):
        zipf_accesses(
            LAYOUT, ROW, table_rows=10, exponent=1.0, drift_rows=0.0, accesses_per_rank=MAX_STEP_ACCESSES,
            steps=4, seed=0,
        )  # fmt: skip
    for change in ({"table_rows": 0}, {"table_rows": 2**40 + 1}, {"drift_rows": -1.0}, {"seed": -1}, {"exponent": 9.0}):
        numbers = {"table_rows": 10, "exponent": 1.0, "drift_rows": 0.0, "seed": 0} | change
        with pytest.raises(ConfigError, match="Zipf"):
            zipf_accesses(LAYOUT, ROW, accesses_per_rank=4, steps=4, **numbers)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no access"):
        profile_accesses(
            "p", profile_of(weight=0.0), [TableSpec("t", 10, 4)], LAYOUT, accesses_per_rank=4, steps=4, seed=0
        )


def test_every_row_is_listed_with_its_share_of_its_table() -> None:
    keyspace = KeySpace([TableSpec("a", 4, 4), TableSpec("b", 4, 4), TableSpec("c", 4, 4)])
    first = keyspace.first_key
    keys = [[[0, 1, 1], [1]], [[int(first[2]) + 3, 1], []]]
    profile = exact_profile([[np.array(rank, np.int64) for rank in step] for step in keys], keyspace)
    a, b, c = profile.tables
    assert a.hot_rows.tolist() == [1, 0]
    assert a.hot_share.tolist() == a.hot_lower.tolist() == a.hot_upper.tolist() == [0.8, 0.2]
    assert (a.weight, a.accesses_per_step, a.coverage, a.distinct_rows) == (5.0, 2.5, 1.0, 2.0)
    assert (len(b.hot_rows), b.weight, b.coverage) == (0, 0.0, 0.0)
    assert (c.hot_rows.tolist(), c.accesses_per_step) == ([3], 0.5)
    assert profile.samples == 6


def test_touches_are_means_over_ranks_nodes_and_steps() -> None:
    keyspace = KeySpace([TableSpec("t", 4, 4)])
    steps = [[[0, 0, 1], [0], [2], []], [[0], [], [], [1]]]
    profile = exact_profile([[np.array(rank, np.int64) for rank in step] for step in steps], keyspace, RankLayout(2, 2))
    (table,) = profile.tables
    assert table.hot_rows.tolist() == [0, 1, 2]
    shares = [of.tolist() for of in (table.touches.per_rank, table.touches.per_node, table.touches.anywhere)]
    assert shares == [[3 / 8, 2 / 8, 1 / 8], [2 / 4, 2 / 4, 1 / 4], [2 / 2, 2 / 2, 1 / 2]]
    passes = exact_profile(
        [[np.array(rank, np.int64) for rank in keys] for keys in steps], keyspace, RankLayout(2, 2), micro_batches=2
    ).tables[0]
    assert passes.accesses_per_step == 2 * table.accesses_per_step, "two passes are one step"
    assert passes.touches.per_rank.tolist() == table.touches.per_rank.tolist(), "touches are of a pass"
