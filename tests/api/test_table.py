"""Tables and hot rows of a daemon."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.errors import ApiError
from tests.support.components import KEYSPACE, components, placed


def test_tables_in_every_order_and_in_pages():
    shown = components(placed())
    page = shown.tables(0, 10, "accesses")
    assert [table.table for table in page.tables] == ["items", "users", "cold"]
    items, users, cold = page.tables
    assert (items.accesses, items.share, users.accesses, cold.accesses) == (4, 0.8, 1, 0)
    assert items.placed_rows == {"HOME": 98, "NODE": 1, "DEVICE": 1}
    assert users.placed_rows == {"HOME": 49, "NODE": 1, "DEVICE": 0}
    assert cold.placed_rows == {"HOME": 10, "NODE": 0, "DEVICE": 0}
    assert users.group == cold.group != items.group
    for order, first in (("name", "cold"), ("configured", "users"), ("memory", "items"), ("replicas", "items")):
        assert shown.tables(0, 10, order).tables[0].table == first, order
    rest = shown.tables(2, 10, "accesses")
    assert (rest.total, rest.offset, [table.table for table in rest.tables]) == (3, 2, ["cold"])
    assert shown.tables(5, 10, "accesses").tables == ()


def test_hot_rows_come_with_tier_and_home():
    page = components(placed()).rows("items", 0, 10)
    assert [(row.place, row.row, row.tier) for row in page.hottest] == [(1, 7, "DEVICE"), (2, 3, "NODE")]
    assert page.hottest[0].share == pytest.approx(0.75)
    key = int(KEYSPACE.keys(KEYSPACE.index["items"], np.array([7]))[0])
    assert (page.hottest[0].key, page.hottest[0].home_rank) == (key, key % 4)
    second = components(placed()).rows("items", 1, 10)
    assert [(row.place, row.row) for row in second.hottest] == [(2, 3)]
    bare = components(ranks=False).rows("items", 0, 1).hottest[0]
    assert (bare.tier, bare.home_rank) == ("HOME", None)
    assert components().rows("cold", 0, 10).hottest == ()
    with pytest.raises(ApiError, match="no table 'nothing'") as missing:
        components().rows("nothing", 0, 1)
    assert missing.value.status == 404
