"""Plans by learned kernels: what ranks hold, the step's price, and a plan that bytes would not make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from flexd.planner.tables.kernel_plans import KernelPrices, place_by_kernels
from flexd.planner.tables.rank_loads import Pieces
from flexd.planner.tables.solve import place_tables
from flexd.planner.tables.torchrec_costs import torchrec_options
from tests.planner.tables.cases import work_of
from tests.support.kernel_sets import known_costs
from tests.support.planner_cases import cluster

LAYOUT = RankLayout(2, 2)
COUNT = 10


def prices(by_table: float, by_id: float) -> KernelPrices:
    work = replace(work_of(3, COUNT, LAYOUT, pooled=1.0), id_bytes=8)
    dims = (work.row_bytes / 4).astype(int).tolist()
    options = torchrec_options(work, dims, LAYOUT, cluster(latency=1e-6))
    return KernelPrices.of(options, work, dims, LAYOUT, known_costs(by_table, by_id))


def test_the_work_of_ranks_is_that_of_what_they_hold() -> None:
    some = prices(1e-3, 0.0)
    place = np.zeros(COUNT, np.int64)
    option = np.full(COUNT, 2)
    option[0], option[1] = 0, 1
    place[1], place[2:] = 1, np.arange(COUNT - 2) % 4
    work = some.rank_work(Pieces(np.arange(COUNT), option, place))
    # One table everywhere, one on the second node, the others whole: two on each rank.
    assert work[:, 0].tolist() == [3, 3, 4, 4]
    np.testing.assert_allclose(some.kernel_seconds(Pieces(np.arange(COUNT), option, place))[:, 0], work[:, 0] * 1e-3)


def test_a_plan_sees_costs_that_bytes_do_not_have() -> None:
    """A second a table: nothing but the number of tables on the fullest rank counts."""
    some = prices(1.0, 0.0)
    found = place_by_kernels(some, 1e12, 400)
    by_bytes = place_tables(some.tables, LAYOUT, 1e12, evaluations=400)
    assert found.seconds == some.seconds(found.pieces)
    assert found.seconds < 0.7 * some.seconds(by_bytes.pieces)
    assert some.rank_work(found.pieces)[:, 0].max() <= 4
    assert found.spread_seconds == pytest.approx(2 * COUNT, rel=0.01)
    assert found.bound_seconds == 0
