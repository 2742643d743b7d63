"""Counts of rows in tiered storage by table, against counting with a loop."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.protocol.report import MAX_NAMED_TABLES, SlowTableReport, named_tables
from flexd.core.keyspace import Homes, KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.embedding.store.slow.tiered_rows import EVICTED, MISSED, USED, WRITTEN, CacheSlotCounts
from flexd.embedding.store.slow.tiered_storage import first_home_slots
from flexd.embedding.store.store import make_stores


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 2**31))
def test_rows_are_counted_for_their_tables(rows: list[int], world_size: int, seed: int) -> None:
    """Tables with fewer rows than ranks have no home row on some of them."""
    keyspace = KeySpace([TableSpec(f"t{number}", count, 4) for number, count in enumerate(rows)])
    homes = Homes(keyspace, RankLayout(1, world_size))
    rng = np.random.default_rng(seed)
    for rank in range(world_size):
        store = make_stores(homes, rank, [0], torch.device("cpu"))[0]
        counts = CacheSlotCounts(torch.device("cpu"), *first_home_slots(store), len(rows))
        expected = np.zeros((len(rows), 4), dtype=np.int64)
        for quantity in (USED, MISSED, EVICTED, WRITTEN):
            slots = np.flatnonzero(rng.random(store.home_rows) < 0.6)
            counts.add(quantity, torch.from_numpy(slots))
            tables = keyspace.table_of(store.first_home_address + world_size * slots)
            np.add.at(expected[:, quantity], tables, 1)
        assert np.array_equal(counts.by_table().numpy(), expected)


def test_a_report_names_the_tables_with_the_most_misses_and_sums_the_others() -> None:
    reports = [SlowTableReport(table, used=10, missed=table, evicted=1, written=2) for table in range(MAX_NAMED_TABLES)]
    assert sorted(report.table for report in named_tables(reports)) == list(range(MAX_NAMED_TABLES))
    few = [SlowTableReport(1000 + number, used=5, evicted=3, written=1) for number in range(4)]
    named = named_tables([*few, *reports])
    assert len(named) == MAX_NAMED_TABLES + 1
    assert [report.table for report in named[:2]] == [MAX_NAMED_TABLES - 1, MAX_NAMED_TABLES - 2]
    # Of the tables without a miss only the one of the lowest number is named.
    assert named[-1] == SlowTableReport(SlowTableReport.OTHERS, used=20, missed=0, evicted=12, written=4)
