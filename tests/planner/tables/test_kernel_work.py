"""The work of sets of tables: sums over their tables, the number of dims, and bytes as the analytic model has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.planner.tables.kernel_costs import DIMS_TERM, TERMS, Pieces


def pieces(count: int = 6) -> Pieces:
    rng = np.random.default_rng(0)
    dim = rng.choice([8.0, 32.0, 128.0], count)
    ids = rng.integers(10, 1000, count).astype(float)
    return Pieces(rng.integers(100, 9000, count).astype(float), dim, ids, ids / 4, ids / 2, 2 * dim)


def test_work_of_places_is_the_sum_of_their_tables() -> None:
    some, place = pieces(), np.array([0, 2, 0, 2, 2, 0])
    work = some.work(place, 4)
    assert work.shape == (4, len(TERMS))
    assert not work[[1, 3]].any()
    terms = some.terms()
    np.testing.assert_allclose(work[2, :DIMS_TERM], terms[place == 2, :DIMS_TERM].sum(axis=0))
    for at in (0, 2):
        assert work[at, DIMS_TERM] == len(np.unique(some.dim[place == at]))
    assert dict(zip(TERMS, terms[0], strict=True))["read_bytes"] == some.ids[0] * 2 * some.dim[0]


@pytest.mark.parametrize("name", ["rows", "dim", "ids", "bags", "distinct"])
def test_no_term_falls_when_a_table_grows(name: str) -> None:
    some = pieces()
    larger = replace(some, **{name: 1.5 * getattr(some, name)})
    if name == "dim":
        larger = replace(larger, row_bytes=1.5 * some.row_bytes)
    assert (larger.terms() >= some.terms()).all()
    assert (larger.terms() > some.terms()).any()
