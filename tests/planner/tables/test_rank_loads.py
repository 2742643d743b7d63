"""Exact maxima of every place, against loads added up anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.placement import RankLayout
from flexd.planner.tables.local_search import RankLoads, ShardAssignment
from tests.planner.tables.cases import options_of

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
