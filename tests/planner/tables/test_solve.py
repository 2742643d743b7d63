"""Exact maxima of every place, against loads added up anew."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import PlanError
from flexd.core.placement import RankLayout
from flexd.planner.tables.costs import CHAIN_OPTIONS
from flexd.planner.tables.local_search import RankLoads, ShardAssignment
from flexd.planner.tables.options import PoolingAt, ShardingKind, TableOption, TableOptions
from flexd.planner.tables.solve import TablePlacement, place_tables
from tests.planner.tables.cases import best_by_milp, options_of

LAYOUTS = [RankLayout(3, 2), RankLayout(1, 4), RankLayout(4, 1), RankLayout(1, 1), RankLayout(2, 3)]


def drawn(seed: int, layout: RankLayout) -> tuple[RankLoads, ShardAssignment]:
    rng = np.random.default_rng(seed)
    tables = options_of(seed, 6, layout)
    option = np.array([rng.choice(np.flatnonzero(allowed)) for allowed in tables.allowed])
    place = np.array([rng.integers(0, tables.options[o].places(layout)) for o in option])
    pieces = ShardAssignment(np.arange(6), option, place)
    return RankLoads.of(tables, layout, np.full(layout.world_size, 1.5e6), pieces), pieces


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), layout=st.sampled_from(LAYOUTS))
def test_seconds_at_every_place_are_those_of_the_placement(seed, layout):
    loads, _ = drawn(seed, layout)
    around = loads.group_maxima()
    for option in np.flatnonzero(loads.tables.allowed[0]).tolist():
        predicted = loads.seconds_at(0, option, around)
        assert len(predicted) == loads.tables.options[option].places(layout)
        for place, seconds in enumerate(predicted.tolist()):
            before = loads.total[-1].copy()
            loads.add(0, option, place)
            holds = loads.total[-1] > before
            fits = bool((loads.total[-1] <= loads.capacity)[holds].all())
            assert seconds == (pytest.approx(loads.seconds(), rel=1e-9) if fits else np.inf)
            loads.add(0, option, place, -1.0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_sent_is_received(layout):
    loads, _ = drawn(1, layout)
    exchanged = loads.total[:-3].reshape(-1, 2, layout.world_size).sum(axis=2)
    np.testing.assert_allclose(exchanged[:, 0], exchanged[:, 1], rtol=1e-9, atol=1e-6)
    assert (loads.total > -1e-6).all()


ROOMY = 1e12


def price_of(placed: TablePlacement) -> float:
    """The price of a placement, computed from its texts alone."""
    tables, layout = placed.tables, placed.layout
    loads = RankLoads(tables, layout, np.full(layout.world_size, ROOMY))
    seconds, answers = 0.0, set()
    for table, (rule, pooling_at) in enumerate(placed.rules()):
        name, _, places = rule.partition(":")
        numbers = [int(place) for place in places.split(",")] if places else [0]
        option = next(
            at for at, one in enumerate(tables.options)
            if one.rule == name and one.pooling_at is pooling_at and one.pieces == len(numbers)
        )  # fmt: skip
        for place in numbers:
            loads.add(table, option, place)
        answers.add(pooling_at)
    fixed = sum(of_answer for pooling_at, of_answer in tables.pooling_seconds if pooling_at in answers)
    return loads.seconds() + seconds + fixed


def with_sums_for_nothing(tables: TableOptions) -> TableOptions:
    return replace(tables, pooling_seconds=())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(3, 1)], ids=str)
def test_near_the_optimum_of_a_milp_and_the_bound_below_it(seed, layout):
    tables = with_sums_for_nothing(options_of(seed, 6, layout))
    memory = 1.3 * float(tables.memory_bytes[:, 0, 0].sum()) + 0.2 * float(tables.memory_bytes[:, -1, -1].max())
    best = best_by_milp(tables, layout, memory)
    placed = place_tables(tables, layout, memory, evaluations=1500)
    assert placed.bound_seconds <= best * (1 + 1e-6)
    assert best * (1 - 1e-6) <= placed.seconds <= best * 1.05
    assert placed.seconds <= placed.spread_seconds
    assert (placed.memory_bytes <= memory * (1 + 1e-9)).all()


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    layout=st.sampled_from([RankLayout(2, 2), RankLayout(1, 3), RankLayout(3, 2), RankLayout(1, 1)]),
    room=st.floats(1.0, 4.0),
)
def test_a_placement_costs_what_it_says_fits_and_is_no_worse_than_spreading(seed, layout, room):
    tables = options_of(seed, 9, layout)
    memory = room * float(tables.memory_bytes[:, 0, 0].sum())
    placed = place_tables(tables, layout, memory, evaluations=400)
    assert price_of(placed) == pytest.approx(placed.seconds, rel=1e-9)
    assert placed.bound_seconds <= placed.seconds <= placed.spread_seconds * (1 + 1e-12)
    assert 0.0 <= placed.gap <= 1.0
    assert (placed.memory_bytes <= memory * (1 + 1e-9)).all()
    answers = {
        pooling_at for (_, pooling_at), bags in zip(placed.rules(), tables.allowed[:, 1], strict=True) if not bags
    }
    assert answers <= {PoolingAt.REQUESTER, PoolingAt.NONE}
    assert place_tables(tables, layout, memory, evaluations=400).rules() == placed.rules()


def test_sums_only_if_they_pay_for_their_collectives():
    layout = RankLayout(2, 2)
    tables = options_of(3, 8, layout)
    cheap = place_tables(replace(tables, pooling_seconds=((PoolingAt.OWNER, 0.0),)), layout, ROOMY, evaluations=400)
    dear = place_tables(replace(tables, pooling_seconds=((PoolingAt.OWNER, 10.0),)), layout, ROOMY, evaluations=400)
    assert PoolingAt.OWNER in {pooling_at for _, pooling_at in cheap.rules()}
    assert PoolingAt.OWNER not in {pooling_at for _, pooling_at in dear.rules()}
    assert dear.bound_seconds >= cheap.bound_seconds


def test_columns_are_on_ranks_of_their_own():
    layout = RankLayout(2, 2)
    whole = TableOption(ShardingKind.TABLE_WISE, PoolingAt.OWNER)
    cut = TableOption(ShardingKind.COLUMN_WISE, PoolingAt.OWNER, 4)
    tables = with_sums_for_nothing(options_of(2, 5, layout, (CHAIN_OPTIONS[0], whole), pooled=1.1))
    # A piece has a quarter of a whole table.
    tables = replace(
        tables,
        options=(whole, cut),
        loads=np.stack([tables.loads[:, 1], tables.loads[:, 1] / 4], axis=1),
        memory_bytes=np.stack([tables.memory_bytes[:, 1], tables.memory_bytes[:, 1] / 4], axis=1),
    )
    placed = place_tables(tables, layout, ROOMY, evaluations=400)
    ranks = [rule.partition(":")[2].split(",") for rule, _ in placed.rules() if rule.startswith("column_wise")]
    assert ranks
    assert all(sorted(of_table) == ["0", "1", "2", "3"] for of_table in ranks)
    assert price_of(placed) == pytest.approx(placed.seconds)


def test_what_does_not_fit_is_an_error():
    tables = options_of(0, 4, RankLayout(2, 2))
    with pytest.raises(PlanError, match=r"4 tables of .* find no place"):
        place_tables(tables, RankLayout(2, 2), 0.5 * float(tables.memory_bytes[:, 0, 0].sum()))
    with pytest.raises(PlanError, match="memory of a rank"):
        place_tables(tables, RankLayout(2, 2), 0.0)
