"""Plans by learned kernels: what ranks hold, the step's price, and a plan that bytes would not make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from flexd.planner.model.workload import ACCESSES, ANYWHERE, PER_NODE
from flexd.planner.tables.chain_loads import kernel_bytes
from flexd.planner.tables.kernel_plans import KernelPrices, chain_pieces, held_pieces, place_by_kernels
from flexd.planner.tables.options import Answer, HomeKind, Option, Part
from flexd.planner.tables.rank_loads import Pieces, RankLoads
from flexd.planner.tables.solve import place_tables
from flexd.planner.tables.torchrec_costs import OPTIONS, torchrec_options
from tests.planner.tables.cases import options_of, work_of
from tests.support.kernel_sets import known_costs
from tests.support.planner_cases import cluster

LAYOUT = RankLayout(2, 2)
COUNT = 10


def prices(by_table: float, by_id: float) -> KernelPrices:
    work = replace(work_of(3, COUNT, LAYOUT, pooled=1.0), id_bytes=8)
    dims = (work.row_bytes / 4).astype(int).tolist()
    options = torchrec_options(work, dims, LAYOUT, cluster(latency=1e-6))
    return KernelPrices.of(options, work, dims, LAYOUT, known_costs(by_table, by_id))


def test_ranks_hold_what_an_option_gives_them() -> None:
    work = work_of(3, COUNT, LAYOUT, pooled=1.0)
    held = held_pieces(work, [8] * COUNT, LAYOUT, OPTIONS)
    ids = held.ids.reshape(COUNT, len(OPTIONS))
    all_ids = work.statistics[:, ACCESSES] * 4
    np.testing.assert_allclose(ids / all_ids[:, None], np.broadcast_to([1 / 4, 1 / 2, 1, 1 / 4, 1, 1], ids.shape))
    bags = held.bags.reshape(COUNT, len(OPTIONS))
    np.testing.assert_allclose(bags[:, 2], work.bags * 4)
    assert (bags[:, 0] <= bags[:, 2]).all()
    assert (bags[:, 0] >= bags[:, 2] / 4 * (1 - 1e-9)).all()
    np.testing.assert_allclose(held.dim.reshape(COUNT, -1)[:, 4:], [[4.0, 2.0]] * COUNT)
    np.testing.assert_allclose(held.distinct.reshape(COUNT, -1)[:, 1], work.statistics[:, ANYWHERE] / 2)


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


def test_planned_seconds_are_those_of_sets() -> None:
    """The costs are a sum here, so the scale is 1 and what is planned is what is priced."""
    some = prices(1e-4, 1e-8)
    placed = place_tables(some.tables, LAYOUT, 1e12, evaluations=300)
    priced = some.priced(placed.pieces)
    np.testing.assert_allclose(priced.seconds_per_unit[-2:], 1.0)
    again = place_tables(priced, LAYOUT, 1e12, evaluations=300)
    assert again.seconds == pytest.approx(some.seconds(again.pieces))


CHAIN = [Option(kind, Answer.ROWS) for kind in (HomeKind.ALL, HomeKind.NODE, HomeKind.RANK)]


def test_a_home_of_flexd_looks_up_rows_once_for_every_node_and_sums_for_every_id() -> None:
    work = work_of(3, COUNT, LAYOUT, pooled=1.0)
    sums = np.arange(COUNT) % 2 == 0
    held = chain_pieces(work, [8] * COUNT, LAYOUT, CHAIN, sums)
    ids, bags = (column.reshape(COUNT, -1) for column in (held.ids, held.bags))
    asked = 2 * work.statistics[:, PER_NODE]
    np.testing.assert_allclose(ids[~sums], (asked[:, None] / [4, 2, 1])[~sums])
    np.testing.assert_allclose(bags[~sums], ids[~sums])
    np.testing.assert_allclose(ids[sums], (4 * work.statistics[:, ACCESSES][:, None] / [4, 2, 1])[sums])
    np.testing.assert_allclose(held.distinct.reshape(COUNT, -1)[:, 2], work.statistics[:, ANYWHERE])


def test_kernels_of_flexd_are_those_of_homes_by_measurements_and_those_in_transit_by_bytes() -> None:
    work = work_of(3, COUNT, LAYOUT, pooled=1.0)
    work = replace(work, trained=np.where(np.arange(COUNT) == 0, 0.0, 1.0))
    tables = options_of(3, COUNT, LAYOUT, tuple(CHAIN), pooled=1.0)
    sums = np.arange(COUNT) < COUNT // 2
    some = KernelPrices.of_chain(tables, work, [8] * COUNT, LAYOUT, known_costs(1e-3, 0.0), sums)
    option = np.full(COUNT, 2)
    pieces = Pieces(np.arange(COUNT), option, np.arange(COUNT) % 4)
    # Tables that answer by rows are looked up everywhere, and pass through the ranks of their home's rail.
    accesses = (work.statistics[:, ACCESSES] + work.bags) * work.row_bytes
    everywhere = 1e-12 * accesses[~sums].sum()
    kernels = some.kernel_seconds(pieces)
    transit = kernels[:, 0] - 1e-3 * np.array([3, 3, 2, 2])
    assert (transit > everywhere * (1 - 1e-6)).all()
    np.testing.assert_allclose(transit[0], transit[2], err_msg="the ranks of a rail pass on alike")
    np.testing.assert_allclose((kernels[:, 1] / 1e-3).round(2), [2, 3, 2, 2], err_msg="a frozen table has no update")
    by_sums = KernelPrices.of_chain(tables, work, [8] * COUNT, LAYOUT, known_costs(1e-3, 0.0), np.ones(COUNT, bool))
    assert not by_sums.transit_seconds.any()
    whole = kernel_bytes(work, LAYOUT, HomeKind.RANK, sums=False)
    assert (some.transit_seconds[~sums, 2] <= 1e-12 * whole[~sums] * (1 + 1e-9)).all()
    assert not some.transit_seconds[~sums, 2, Part.HOME_RANK].any()


def test_what_pieces_of_flexd_add_has_the_seconds_of_the_sets_that_they_are_in() -> None:
    work = work_of(3, COUNT, LAYOUT, pooled=1.0)
    tables = options_of(3, COUNT, LAYOUT, tuple(CHAIN), pooled=1.0)
    some = KernelPrices.of_chain(tables, work, [8] * COUNT, LAYOUT, known_costs(1e-4, 1e-8), np.arange(COUNT) < 4)
    pieces = Pieces(np.arange(COUNT), np.full(COUNT, 2), np.arange(COUNT) % 4)
    priced = some.priced(pieces)
    loads = RankLoads.of(priced, LAYOUT, np.full(4, np.inf), pieces)
    assert loads.seconds() == pytest.approx(some.seconds(pieces))
    np.testing.assert_allclose(
        priced.axis_seconds @ loads.total.reshape(len(loads.total), -1)[:-1], some.rank_seconds(pieces)
    )
