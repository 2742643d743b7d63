"""The work of sets of tables: sums over their tables, the number of dims, and bytes as the analytic model has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.planner.tables.kernel_work import DIMS_TERM, TERMS, Pieces, analytic_bytes
from flexd.topology.kernel_file import TableSet


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


def test_the_tables_of_measured_sets_are_pieces() -> None:
    sets = (
        TableSet("float16", *(np.array(v, float) for v in ([5, 6], [8, 16], [7, 9], [2, 3], [0, 1], [4, 4]))),
        TableSet("float32", *(np.array([v], float) for v in (10, 4, 8, 2, 0, 6))),
    )
    found, place = Pieces.of_sets(sets)
    assert place.tolist() == [0, 0, 1]
    assert found.row_bytes.tolist() == [16, 32, 16]
    assert found.distinct.tolist() == [4, 4, 6]


@pytest.mark.parametrize("name", ["rows", "dim", "ids", "bags", "distinct"])
def test_no_term_falls_when_a_table_grows(name: str) -> None:
    some = pieces()
    larger = replace(some, **{name: 1.5 * getattr(some, name)})
    if name == "dim":
        larger = replace(larger, row_bytes=1.5 * some.row_bytes)
    assert (larger.terms() >= some.terms()).all()
    assert (larger.terms() > some.terms()).any()


def test_analytic_bytes_are_those_of_the_planner() -> None:
    work = Pieces(*(np.array([v]) for v in (100.0, 8.0, 50.0, 10.0, 20.0, 16.0))).work(np.zeros(1, np.int64), 1)
    # Look-ups read 50 rows; an update reads as many gradients and reads and writes 20 rows with 4 bytes of state.
    assert analytic_bytes(work).tolist() == [[800.0, 800.0 + 2 * 20 * 20]]
