"""Profiles: arrays of a table must agree in length; source shares follow the sources."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flexd.core.errors import SketchError
from flexd.core.layout import RankLayout
from flexd.sketch.node_sources import read_sources
from flexd.sketch.profile import TableProfile

SHARE = np.array([0.5, 0.25])
TABLE = TableProfile(
    "t", 9, 8.0, 0.0, np.array([3, 1]), SHARE, SHARE, SHARE, np.array([0.125]), np.array([2.0]), 4.0, 1.0
)


@pytest.mark.parametrize("name", ["hot_rows", "hot_share", "hot_lower", "hot_upper", "bin_share", "bin_rows"])
def test_arrays_of_different_lengths_are_refused(name: str) -> None:
    longer = np.append(getattr(TABLE, name), 0)
    with pytest.raises(SketchError, match="'t'"):
        dataclasses.replace(TABLE, **{name: longer})


def test_source_shares_are_those_of_the_sources_in_the_order_of_the_hot_rows() -> None:
    assert TABLE.source_node_share is None
    rows, ranks = np.repeat(np.array([3, 1]), 400), np.repeat(np.array([0, 3], dtype=np.int32), 400)
    sources = read_sources(rows, ranks, TABLE.hot_rows, RankLayout(2, 2))
    share = dataclasses.replace(TABLE, sources=sources).source_node_share
    assert share is not None
    np.testing.assert_array_equal(share, sources.share(np.array([0, 1])))
    assert share == pytest.approx(np.eye(2), abs=0.02)
