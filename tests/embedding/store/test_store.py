"""Row storage of one rank: free replica slots."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import Homes, KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.embedding.store.store import FreeSlots, make_stores

CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["allocate", "release", "compact", "drop"]), st.integers(0, 4)), max_size=40
    )
)
def test_a_replica_slot_is_never_allocated_twice(actions: list[tuple[str, int]]) -> None:
    """This holds with dropped chunks, and for any time at which the first prepared chunk is applied."""
    store = make_stores(Homes(KeySpace([TableSpec("t", 7, 2)]), RankLayout(1, 2)), 1, [9], CPU)[0]
    everything = set(range(store.home_rows, store.home_rows + 9))
    free = store.free
    allocated: list[int] = []
    waiting: list[FreeSlots] = []
    for action, count in actions:
        if action == "allocate" and count <= len(free):
            got, free = free.allocate(count)
            allocated += got.tolist()
        elif action == "release":
            back, allocated = allocated[:count], allocated[count:]
            free = free.release(np.array(back, dtype=np.int32))
        elif action == "drop":  # prepared, and dropped
            free.release(np.array(allocated, dtype=np.int32)).allocate(len(everything))
        elif action == "compact" and waiting:
            waiting[count % len(waiting)].compacted()
            waiting = waiting[count % len(waiting) + 1 :]
        waiting.append(free)
        assert len(set(allocated)) == len(allocated)
        assert len(free) == 9 - len(allocated)
        assert set(free.allocate(len(free))[0].tolist()) == everything - set(allocated)
