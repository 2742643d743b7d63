"""Memory of a rank: bound of the listed rows, and bytes counted on the live tensors."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexd
from flexd.core.keyspace import DimGroup, Homes, KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.embedding import devices
from flexd.embedding.store.directory import max_listed_rows
from flexd.embedding.store.memory import RankMemory, rank_memory
from flexd.embedding.store.store import make_stores
from tests.support.slots_of_share import slots_of_share
from tools.bench.mirror_ranks import mirrored
from tools.bench.sections.dispatch import Case, batch, keyspace_of, placement, tables_of

CPU = torch.device("cpu")
TABLES = KeySpace([TableSpec("narrow", 61, 2), TableSpec("wide", 23, 8, "float16", "rowwise_adagrad")])


def memory_of(layout: RankLayout, slots: int = 5, pending: object = None, **bytes_of_parts: int) -> RankMemory:
    stores = make_stores(Homes(TABLES, layout), 0, [slots] * 2, CPU)
    parts = {"waiting_bytes": 0, "working": None, "prepared_bytes": 0} | bytes_of_parts
    return rank_memory(stores, layout, 1000, 10, pending, **parts)


@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(1, 1), RankLayout(1, 3)], ids=str)
def test_rows_and_replica_slots_count_values_and_optimizer_state(layout: RankLayout) -> None:
    memory = memory_of(layout)
    narrow, wide = 2 * 4, 8 * 2 + 4  # row-wise Adagrad has one float32 per row
    assert memory.home_bytes == -(-61 // layout.world_size) * narrow + sum(
        wide for key in range(61, 84) if key % layout.world_size == 0
    )
    assert memory.replica_bytes == 5 * (narrow + wide)
    assert memory.free_list_bytes == 2 * 4 * 5


def test_a_storage_of_waiting_passes_is_counted_once() -> None:
    values = torch.zeros(100, dtype=torch.float64)
    other = torch.zeros(7, dtype=torch.int32)
    memory = memory_of(RankLayout(2, 2), pending=[values, {"view": values[:3], "other": (other, None, "text")}])
    assert memory.pending_bytes == 800 + 28


@settings(max_examples=100, deadline=None)
@given(
    nodes=st.integers(1, 4), local_ranks=st.integers(1, 4), slots=st.integers(0, 12), seed=st.integers(0, 999),
    lean=st.integers(0, 3),
)  # fmt: skip
def test_no_placement_within_the_slots_lists_more_rows_than_the_bound(
    nodes: int, local_ranks: int, slots: int, seed: int, lean: int
) -> None:
    """Rows are added greedily; ``lean`` prefers rows of one home, for which that rank needs no slot."""
    layout = RankLayout(nodes, local_ranks)
    rng = np.random.default_rng(seed)
    keys = rng.permutation(60)
    keys = keys[np.argsort(keys % layout.world_size != lean, kind="stable")]
    tiers = rng.integers(1, 3, 60).astype(np.uint8) if seed % 2 else np.full(60, 2 - seed % 4 // 2, np.uint8)
    chosen = np.zeros(60, dtype=bool)
    for at in range(60):
        chosen[at] = True
        if (layout.replica_slots_used(keys[chosen], tiers[chosen]) > slots).any():
            chosen[at] = False
    bound = max_listed_rows(DimGroup(2, "float32", "sgd", 0, 60, (0,)), layout, slots)
    for local in range(local_ranks):
        node = (tiers == 1) & (keys % local_ranks == local) & (nodes > 1)
        assert (chosen & (node | ((tiers == 2) & (layout.world_size > 1)))).sum() <= bound


@pytest.mark.parametrize("host", [True, False])
def test_directories_and_lists_of_several_dim_groups_stay_within_their_bound(host: bool) -> None:
    """Nearly every replica slot in use, at mixed tiers, in the ways of host memory and of accelerators."""
    case = Case("", RankLayout(2, 2), 4, 64, copies=0.45)
    keyspace = keyspace_of(case)
    with (
        mirrored([(group.first_key, group.end_key) for group in keyspace.groups]),
        mock.patch.object(devices, "in_host_memory", return_value=host),
    ):
        collection = flexd.EmbeddingCollection(
            tables_of(case), layout=case.layout, replica_slots=slots_of_share(tables_of(case), 0.35)
        )
        before = collection.memory()
        engine = collection.engine
        engine.migrator.apply([engine.migrator.prepare(placement(case, keyspace), None)])
        torch.cat([one.values.flatten() for one in collection(batch(case, 0)).values()]).sum().backward()
        collection.optimizer.step()
        memory = collection.memory()
    of_one_exchange = memory.working_bytes - before.working_bytes
    assert of_one_exchange > 0
    assert memory.directory_bytes + 2 * of_one_exchange <= before.max_directory_bytes
