"""Row storage of one rank: home slots, free replica slots, packing."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import DimGroup, TableSpec
from flexd.core.layout import RankLayout
from flexd.embedding.store.store import TORCH_DTYPES, FreeSlots, GroupStore

CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None)
@given(nodes=st.integers(1, 4), local_ranks=st.integers(1, 5), first_key=st.integers(0, 50), rows=st.integers(1, 60))
def test_every_key_has_one_home_slot(nodes: int, local_ranks: int, first_key: int, rows: int) -> None:
    layout = RankLayout(nodes, local_ranks)
    group = DimGroup(2, "float32", "sgd", first_key, rows, (0,))
    stores = [GroupStore(group, layout, rank, 3, CPU) for rank in range(layout.world_size)]
    assert sum(store.home_rows for store in stores) == rows
    homes = np.concatenate([store.home_addresses() for store in stores])
    assert sorted(homes.tolist()) == list(range(first_key, first_key + rows))
    keys = torch.arange(first_key, first_key + rows)
    held_by = torch.zeros(rows, dtype=torch.int64)
    for store in stores:
        held, slots, entry = store.locate(keys)
        held_by += held
        assert slots[held].tolist() == list(range(store.home_rows)), "home rows in slot order, none left out"
        assert (entry == -1).all()
        assert keys[held].tolist() == store.home_addresses().tolist()
        assert (layout.home_rank(store.home_addresses()) == store.rank).all()
        assert store.rows.shape[0] == store.home_rows + 3
    assert (held_by == 1).all()


@settings(max_examples=100, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["allocate", "release", "compact", "drop"]), st.integers(0, 4)), max_size=40
    )
)
def test_a_replica_slot_is_never_allocated_twice(actions: list[tuple[str, int]]) -> None:
    """This holds with dropped chunks, and for any time at which the first prepared chunk is applied."""
    store = GroupStore(DimGroup(2, "float32", "sgd", 0, 7, (0,)), RankLayout(1, 2), 1, 9, CPU)
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


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    optimizer=st.sampled_from(["sgd", "rowwise_adagrad"]),
    dim=st.integers(1, 9),
    count=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_unpack_inverts_pack_bit_by_bit(dtype: str, optimizer: str, dim: int, count: int, seed: int) -> None:
    group = DimGroup(dim, dtype, optimizer, 0, 12, (0,))
    here, there = (GroupStore(group, RankLayout(1, 1), 0, 4, CPU) for _ in range(2))
    rng = np.random.default_rng(seed)
    for held in (here.rows, here.state):
        raw = held.view(torch.uint8)
        raw.copy_(torch.from_numpy(rng.integers(0, 256, size=tuple(raw.shape), dtype=np.uint8)))
    source = torch.from_numpy(rng.permutation(16)[:count])
    target = torch.from_numpy(rng.permutation(16)[:count])
    packed = here.pack(source)
    assert packed.shape == (count, here.row_bytes)
    spec = TableSpec("t", 12, dim, dtype, optimizer)
    assert here.row_bytes == spec.row_bytes + spec.state_bytes
    there.unpack(packed, target)
    for name in ("rows", "state"):
        got, sent = (getattr(store, name).view(torch.uint8) for store in (there, here))
        assert torch.equal(got[target], sent[source])
        others = torch.ones(16, dtype=torch.bool).index_fill_(0, target, False)
        assert not got[others].any(), "other slots are untouched"
