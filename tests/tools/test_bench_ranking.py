"""The ranking model of the cluster benchmark: its tables and batches."""

from __future__ import annotations

import numpy as np
import pytest

from tools.bench.planning import made_up_tables
from tools.bench.ranking_tables import DIMS, Setting, batches_of, scaled

pytestmark = pytest.mark.alone
SMALL = Setting(scaled(made_up_tables(20), 6, 16), samples=16, batches=2)


def test_a_list_is_scaled_and_keeps_its_busy_tables() -> None:
    tables = SMALL.listed()
    # Two of the six places in the order of traffic fall on one table.
    assert [table.name for table in tables] == [*(f"p{i}" for i in range(5)), "s0", "s1"]
    assert {table.bags for table in tables[:5]} == {1.0}
    assert [table.lookups for table in tables[5:]] == [40.0, 60.0]
    assert all(DIMS[0] // 4 * 4 <= table.dim <= DIMS[1] and table.dim % 4 == 0 for table in tables)
    busiest = max((t for t in made_up_tables(20) if t.bags), key=lambda t: t.lookups * t.dim)
    assert tables[0].lookups == min(busiest.lookups, 100.0)


def test_batches_have_the_look_ups_of_the_tables_and_differ_by_rank() -> None:
    first, other = batches_of(SMALL, 0)[0], batches_of(SMALL, 1)[0]
    for table in SMALL.listed():
        assert first.lengths[table.name].sum() == len(first.values[table.name])
        assert first.values[table.name].max() < table.rows
    assert (first.lengths["s1"] == 60).all()
    assert first.lengths["p0"].mean() == pytest.approx(SMALL.listed()[0].lookups, rel=0.4)
    assert not np.array_equal(first.values["s0"], other.values["s0"])
