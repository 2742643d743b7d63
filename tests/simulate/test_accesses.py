"""Accesses of a trace, a Zipf distribution or a profile: distribution, repetition, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.errors import ConfigError
from flexd.core.keyspace import TableSpec
from flexd.core.layout import RankLayout
from flexd.simulate.accesses import MAX_STEP_ACCESSES, RowFormat, profile_accesses, trace_accesses, zipf_accesses
from flexd.simulate.step_keys import exact_profile
from flexd.sketch.profile import Profile, TableProfile
from flexd.stream.trace import synthetic_trace

LAYOUT = RankLayout(2, 2)


def profile_of(weight: float = 1.0) -> Profile:
    share = np.array([0.25, 0.25])
    table = TableProfile(
        "t", 10, weight, 1.0, np.array([4, 0]), share, np.array([0.1, 0.05]), np.array([3.0, 2.0]), 7.0
    )  # fmt: skip
    return Profile((table,))


def test_a_profile_of_a_trace_is_drawn_from() -> None:
    trace = synthetic_trace(20_000, rows=900, active=300, users=200)
    accesses = trace_accesses("t", trace, LAYOUT, RowFormat(), batch_size=16, steps=8, history=8)
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
        RankLayout(1, 1), RowFormat(), table_rows=500, exponent=1.0, drift_rows=2.0, accesses_per_rank=200_000,
        steps=10, seed=0,
    )  # fmt: skip
    counts = [np.bincount(accesses.passes(step)[0][0], minlength=500) for step in (0, 5)]
    places = [np.argsort(-count, kind="stable") for count in counts]
    hottest = places[0][0]
    total = (1 / np.arange(1, 501)).sum()
    assert counts[0][hottest] == pytest.approx(200_000 / total, rel=0.03)
    assert counts[1][hottest] == pytest.approx(200_000 / total / 11, rel=0.1)
    assert counts[1][places[1][0]] == pytest.approx(200_000 / total, rel=0.03)
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
            LAYOUT, RowFormat(), table_rows=10, exponent=1.0, drift_rows=0.0, accesses_per_rank=MAX_STEP_ACCESSES,
            steps=4, seed=0,
        )  # fmt: skip
    for change in ({"table_rows": 0}, {"table_rows": 2**40 + 1}, {"drift_rows": -1.0}, {"seed": -1}, {"exponent": 9.0}):
        numbers = {"table_rows": 10, "exponent": 1.0, "drift_rows": 0.0, "seed": 0} | change
        with pytest.raises(ConfigError, match="Zipf"):
            zipf_accesses(LAYOUT, RowFormat(), accesses_per_rank=4, steps=4, **numbers)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no access"):
        profile_accesses(
            "p", profile_of(weight=0.0), [TableSpec("t", 10, 4)], LAYOUT, accesses_per_rank=4, steps=4, seed=0
        )
