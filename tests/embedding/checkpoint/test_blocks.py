"""Exchange between homes and blocks of rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.homes import Homes
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.embedding.checkpoint.blocks import TableHomes
from flexd.embedding.store.store import make_stores

CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 60),
    before=st.integers(0, 9),
    others=st.integers(1, 20),
    nodes=st.integers(1, 3),
    local_ranks=st.integers(1, 3),
    window=st.integers(1, 12),
    rule=st.sampled_from(["all", "all", "node:0", "rank:0"]),
)
def test_every_row_is_sent_once_from_its_slot(
    rows: int, before: int, others: int, nodes: int, local_ranks: int, window: int, rule: str
) -> None:
    """In a dim-group behind another, and behind a table of its own dim-group."""
    layout, world = RankLayout(nodes, local_ranks), nodes * local_ranks
    tables = [TableSpec("other", others, 3), TableSpec("before", before + 1, 2), TableSpec("t", rows, 2, homes=rule)]
    homes_of_job = Homes(KeySpace(tables), layout)
    sent = np.full(rows, -1)
    for rank in range(world):
        store = make_stores(homes_of_job.groups, layout, rank, [0, 0], CPU, homes=homes_of_job)[1]
        homes = TableHomes(homes_of_job, 2, rank)
        assert sum(len(homes.block(other)) for other in range(world)) == rows
        for other in range(world):
            before_it = range(0)
            for number in range(-(-homes.block_rows // window)):
                rows_of_window = homes.window(other, number, window)
                assert number == 0 or not len(rows_of_window) or rows_of_window.start == before_it.stop
                before_it = rows_of_window
                run = homes.run(rows_of_window)
                own_rows = list(run.rows)
                assert homes.count(rank, rows_of_window) == len(own_rows)
                assert set(own_rows) <= set(rows_of_window)
                assert (homes.home_of(torch.tensor(own_rows, dtype=torch.int64)) == rank).all()
                keys = np.array(own_rows, dtype=np.int64) + homes.first_key
                slots = np.arange(store.home_rows)[run.slots]
                addresses = torch.from_numpy(homes_of_job.addresses(keys))
                assert slots.tolist() == store.home_slots(addresses).tolist()
                assert (sent[own_rows] == -1).all()
                sent[own_rows] = other
    assert sent.tolist() == [row // homes.block_rows for row in range(rows)]
