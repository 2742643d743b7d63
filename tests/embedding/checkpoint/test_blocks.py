"""Exchange between homes and blocks of rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import DimGroup
from flexd.core.layout import RankLayout
from flexd.embedding.checkpoint.blocks import TableHomes
from flexd.embedding.store.store import GroupStore


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 60),
    before=st.integers(0, 9),
    first_key=st.integers(0, 20),
    world=st.integers(1, 7),
    window=st.integers(1, 12),
)
def test_every_row_is_sent_once_from_its_slot(rows: int, before: int, first_key: int, world: int, window: int) -> None:
    group = DimGroup(2, "float32", "sgd", first_key, before + rows, (0, 1))
    layout = RankLayout(1, world)
    sent = np.full(rows, -1)
    for rank in range(world):
        store = GroupStore(group, layout, rank, 0, torch.device("cpu"))
        homes = TableHomes(rows, first_key + before, store.first_home_key, world, rank)
        assert sum(len(homes.block(other)) for other in range(world)) == rows
        for other in range(world):
            before_it = range(0)
            for number in range(-(-homes.block_rows // window)):
                rows_of_window = homes.window(other, number, window)
                assert number == 0 or not len(rows_of_window) or rows_of_window.start == before_it.stop
                before_it = rows_of_window
                own_rows = homes.homed(rank, rows_of_window)
                assert set(own_rows) <= set(rows_of_window)
                keys = np.array(own_rows, dtype=np.int64) + first_key + before
                assert (keys % world == rank).all()
                assert (
                    np.arange(store.home_rows)[homes.slots(own_rows)].tolist()
                    == store.home_slots(torch.from_numpy(keys)).tolist()
                )
                assert (sent[list(own_rows)] == -1).all()
                sent[list(own_rows)] = other
    assert sent.tolist() == [row // homes.block_rows for row in range(rows)]
