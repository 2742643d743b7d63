"""Migrations compared with a dict: random chunks through inbox and migrator, refused chunks, memory, faults; and rows
that live in other nodes than their homes."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import REHOMED, Delta, Placement, RankLayout, Tier
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import RowWiseAdagrad
from flexd.embedding.store.store import GroupStore
from tests.support.collection_jobs import offer
from tests.support.rank_pool import Ranks, error_of
from tools.bench.sections.dispatch import Counting

TABLES = [
    EmbeddingTable("item", 61, 8, dtype="float32", init_scale=0.5),
    EmbeddingTable("odd", 23, 3, dtype="float16", init_scale=0.5),
]


ROWS = sum(table.rows for table in TABLES)
EVERYTHING = {table.name: Jagged(torch.arange(table.rows), torch.tensor([table.rows])) for table in TABLES}


def _collection(layout: RankLayout, slots: list[int], cap_bytes: int) -> EmbeddingCollection:
    return EmbeddingCollection(
        TABLES, optimizer=RowWiseAdagrad(lr=0.1), layout=layout, replica_slots=slots,
        max_migration_bytes_per_step=cap_bytes,
    )  # fmt: skip


def train_step(collection: EmbeddingCollection, factor: int = 1) -> None:
    sum((jagged.values.float() * factor).sin().sum() for jagged in collection(EVERYTHING).values()).backward()
    collection.optimizer.step()


def listed_slots(store: GroupStore) -> list[int]:
    """Slots of the listed rows of a dim-group that are here."""
    keys, _, slots = store.directory.rows()
    return list(slots[(keys >= store.group.first_key) & (keys < store.group.end_key) & (slots >= 0)].tolist())


def follow_chunks(rank: int, layout: RankLayout, chunks: list[Delta], slots: list[int], cap: int, seed: int) -> Any:
    """Receive the chunks at random times while looking rows up; return the state once all are applied."""
    collection = _collection(layout, slots, cap)
    engine = collection.engine
    stores = engine.stores
    # After training, each row has a different value and state, which the copies must have, too.
    for step in range(2):
        train_step(collection, step + 1)
    before = {table.name: collection.gather_table(table.name) for table in TABLES}
    held = [(store.rows.data_ptr(), store.state.data_ptr(), store.rows.shape, store.state.shape) for store in stores]
    fixed = collection.memory()
    rng = np.random.default_rng([seed, rank])
    offered, steps, largest = 0, 0, 0
    while collection.placement_version < len(chunks):
        for _ in range(int(rng.integers(0, 4))):
            if offered < len(chunks):
                offered += 1
                engine.inbox.offer(offered, chunks[offered - 1])
        with torch.no_grad():
            looked_up = collection(EVERYTHING)
        memory = collection.memory()
        largest = max(largest, memory.stored_bytes + memory.pending_bytes)
        assert all(torch.equal(looked_up[name].values, table) for name, table in before.items()), "a look-up changed"
        steps += 1
    keys, tiers = engine.migrator.placement()
    slots_by_key = [listed_slots(store) for store in stores]
    memory = collection.memory()
    return {
        "keys": keys, "tiers": tiers, "digest": engine.migrator.digest, "steps": steps,
        "free": [len(store.free) for store in stores],
        "slots_distinct": all(len(set(slots)) == len(slots) for slots in slots_by_key),
        "tables_unchanged": all(torch.equal(collection.gather_table(name), table) for name, table in before.items()),
        "bit_equal": collection.replicas_bit_equal(),
        "same_tensors": held
        == [(store.rows.data_ptr(), store.state.data_ptr(), store.rows.shape, store.state.shape) for store in stores],
        "memory_constant": (fixed.home_bytes, fixed.replica_bytes, fixed.free_list_bytes)
        == (memory.home_bytes, memory.replica_bytes, memory.free_list_bytes),
        "within": largest <= memory.budget_bytes and memory.directory_bytes <= memory.max_directory_bytes,
        "memory": memory,
        "waiting": memory.waiting_bytes, "versions": collection.placement_version,
    }  # fmt: skip


def refuse(rank: int, layout: RankLayout, good: list[Delta], wrong: Delta, applied: bool) -> tuple[str, bool]:
    """Offer a wrong chunk after good ones (applied, or waiting); return the error, and whether the next chunk fits."""
    collection = _collection(layout, [61, 23], 2**20)
    inbox = collection.engine.inbox
    nothing: dict[str, Jagged] = {}
    for version, chunk in enumerate(good[:-1], 1):
        inbox.offer(version, chunk)
    if applied:
        with torch.no_grad():
            collection(nothing)
            collection(nothing)
        assert collection.placement_version == len(good) - 1
    text = error_of(inbox.offer, len(good), wrong)
    inbox.offer(len(good), good[-1])
    with torch.no_grad():
        for _ in range(2):
            collection(nothing)
    return text, collection.placement_version == len(good) and collection.replicas_bit_equal()


def refresh_in_blocks(rank: int, layout: RankLayout, delta: Delta, cap: int) -> dict[str, Any]:
    """Load other home rows under replicas of many rows, with room for a few in the buffer."""
    collection, other = _collection(layout, [61, 23], cap), _collection(layout, [61, 23], cap)
    for made in (collection, other):
        made.engine.inbox.offer(1, delta)
    largest: list[int] = []
    with torch.no_grad():
        for _ in range(2):
            collection(EVERYTHING)
        for store in other.engine.stores:
            store.rows.add_(1)
        collection.load_state_dict(other.state_dict())
        exchange = Peers.all_to_all

        def recorded(peers: Peers, send: torch.Tensor, *counts: Any, **more: Any) -> torch.Tensor:
            largest.append(len(send))
            return exchange(peers, send, *counts, **more)

        with mock.patch.object(Peers, "all_to_all", recorded):
            collection.engine.prepare()
        looked_up = collection(EVERYTHING)
    return {
        "bit_equal": collection.replicas_bit_equal(), "largest": max(largest, default=0), "messages": len(largest),
        "right": all(torch.equal(looked_up[t.name].values, other.gather_table(t.name)) for t in TABLES),
    }  # fmt: skip


KEYSPACE = KeySpace([TableSpec(t.name, t.rows, t.dim, t.dtype, "rowwise_adagrad") for t in TABLES])
SLOTS = [25, 9]


def chunk(moves: dict[int, int], old: dict[int, int] | None = None) -> Delta:
    keys = list(moves)
    before = [(old or {}).get(key, 0) for key in keys]
    return Delta(np.array(keys, np.int64), np.array(before, np.uint8), np.array(list(moves.values()), np.uint8))


def used_slots(layout: RankLayout, placement: dict[int, int]) -> np.ndarray:
    """Return int64 [groups, world]."""
    keys = np.array(list(placement), dtype=np.int64)
    tiers = np.array(list(placement.values()), dtype=np.uint8)
    group = KEYSPACE.group_of(keys)
    return np.stack([layout.replica_slots_used(keys[group == g], tiers[group == g]) for g in range(len(SLOTS))])


def random_chunks(layout: RankLayout, seed: int, count: int) -> tuple[list[Delta], dict[int, int]]:
    """Make chunks in every direction of the same few rows, each fitting the slots, and the dict they lead to. Every
    other chunk moves rows to other nodes, too."""
    rng = np.random.default_rng(seed)
    placement: dict[int, int] = {}
    chunks: list[Delta] = []
    while len(chunks) < count:
        keys = rng.choice(ROWS, size=int(rng.integers(1, 30)), replace=False).tolist()
        kinds = 3 if len(chunks) % 2 == 0 or layout.nodes == 1 else 4
        moves = {key: int(rng.integers(0, kinds)) for key in keys}
        for key in [key for key, tier in moves.items() if tier == REHOMED]:
            home = key % layout.world_size // layout.local_ranks
            moves[key] = REHOMED + (home + int(rng.integers(1, layout.nodes))) % layout.nodes
        after = {key: tier for key, tier in (placement | moves).items() if tier}
        if (used_slots(layout, after) <= np.array(SLOTS)[:, None]).all():
            chunks.append(chunk(moves, placement))
            placement = after
    return chunks, placement


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=(Phase.explicit, Phase.generate),
)  # fmt: skip
@given(
    shape=st.sampled_from([(2, 2), (1, 2), (2, 1), (1, 4), (4, 1)]),
    seed=st.integers(0, 10_000),
    cap=st.sampled_from([1, 100, 1000, 10**6]),
)
def test_any_chunks_lead_to_the_placement_of_a_dict(ranks: Ranks, shape: tuple[int, int], seed: int, cap: int) -> None:
    layout = RankLayout(*shape)
    chunks, expected = random_chunks(layout, seed, 25)
    results = ranks(layout.world_size).run(follow_chunks, layout, chunks, SLOTS, cap, seed)
    whole = Placement.of(np.array(list(expected), np.int64), np.array(list(expected.values()), np.uint8))
    free = np.array(SLOTS)[:, None] - used_slots(layout, expected)
    for rank, result in enumerate(results):
        local = layout.local_rank_of(rank)
        listed = {
            key: tier
            for key, tier in expected.items()
            if (tier == Tier.DEVICE and layout.world_size > 1)
            or (tier in (Tier.NODE, *range(REHOMED, 10)) and layout.nodes > 1 and key % layout.local_ranks == local)
        }
        assert dict(zip(result["keys"].tolist(), result["tiers"].tolist(), strict=True)) == listed
        assert result["digest"] == whole.digest()
        assert result["free"] == free[:, rank].tolist(), "slots leak"
        for name in (
            "slots_distinct",
            "tables_unchanged",
            "bit_equal",
            "same_tensors",
            "memory_constant",
            "within",
        ):
            assert result[name], name
        assert result["steps"] == results[0]["steps"]
        assert result["waiting"] == 0
        if layout.nodes > 1:
            assert 8 * len(listed) <= result["memory"].directory_bytes


GOOD = [chunk({0: 2, 1: 2, 3: 1, 70: 2}), chunk({1: 1, 4: 2}, {1: 2}), chunk({4: 0, 6: 1}, {4: 2})]


@pytest.mark.parametrize("applied", [False, True], ids=["waiting", "applied"])
@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        (chunk({0: 1, 5: 2}), 0),
        (chunk({1: 0}, {1: 2}), 1),
        (chunk({9: 0}, {9: 2}), 9),
        (chunk({8: 2, 70: 0}, {70: 1}), 70),
    ],
    ids=["listed", "moved on", "not listed", "other group"],
)
def test_a_chunk_that_does_not_start_from_the_placement_is_refused(
    ranks: Ranks, wrong: Delta, key: int, applied: bool
) -> None:
    """A chunk is refused before the ranks agree on it: applying it would fail in the middle of training."""
    for text, next_applied in ranks(2).run(refuse, RankLayout(2, 1), GOOD, wrong, applied):
        assert f"chunk 3 are not at the tier that it states, key {key} for one" in text
        assert next_applied


@pytest.mark.parametrize("cap", [1, 300, 10**6])
def test_replicas_are_refreshed_in_blocks(ranks: Ranks, cap: int) -> None:
    layout = RankLayout(2, 2)
    rng = np.random.default_rng(3)
    delta = Placement.empty().delta_to(Placement.of(np.arange(ROWS), rng.integers(0, 3, ROWS).astype(np.uint8)))
    widest = 8 * 4 + 4
    for result in ranks(4).run(refresh_in_blocks, layout, delta, cap):
        assert result["right"]
        assert result["bit_equal"]
        assert 0 < result["largest"] <= max(cap, 2 * widest)
        assert result["messages"] <= 8 if cap == 10**6 else result["messages"] > 8


def chunk_in_inference_mode(rank: int, layout: RankLayout) -> bool:
    """Apply a chunk inside ``torch.inference_mode`` and continue training."""
    collection = _collection(layout, [61, 23], 2**20)
    offer(collection, GOOD[0])
    with torch.inference_mode():
        for _ in range(2):
            collection(EVERYTHING)
    for _ in range(2):
        train_step(collection)
    return collection.placement_version == 1 and collection.replicas_bit_equal()


def fault_beside_a_chunk(rank: int, layout: RankLayout, faulty: int) -> list[tuple[int, int, bool]]:
    """Pass invalid input on one rank in the exchange that agrees on a chunk."""
    collection = _collection(layout, [61, 23], 2**20)
    inbox = collection.engine.inbox
    offer(collection, GOOD[0])
    with pytest.raises(EmbeddingError):
        collection({"item": Jagged(torch.tensor([-1]), torch.tensor([1]))} if rank == faulty else EVERYTHING)
    states = [(inbox.agreed_version, collection.placement_version, len(collection.engine.passes) == 0)]
    train_step(collection)
    return [*states, (inbox.agreed_version, collection.placement_version, collection.replicas_bit_equal())]


def test_a_chunk_applied_in_inference_mode_can_be_trained_on(ranks: Ranks) -> None:
    assert all(ranks(4).run(chunk_in_inference_mode, RankLayout(2, 2)))


@pytest.mark.parametrize(("nodes", "local_ranks", "faulty"), [(1, 1, 0), (2, 2, 2), (2, 1, 0), (1, 2, 1)])
def test_ranks_apply_the_same_chunks_after_a_fault(ranks: Ranks, nodes: int, local_ranks: int, faulty: int) -> None:
    layout = RankLayout(nodes, local_ranks)
    for states in ranks(layout.world_size).run(fault_beside_a_chunk, layout, faulty):
        assert states == [(1, 0, True), (1, 1, True)]


LAYOUT = RankLayout(2, 1)
TABLE_ROWS = 40
BOTH = dict.fromkeys(("item", "shop"), Jagged(torch.arange(TABLE_ROWS), torch.tensor([TABLE_ROWS])))


def made() -> EmbeddingCollection:
    tables = [flexd.EmbeddingTable(name, TABLE_ROWS, 4, dtype="float64", init_scale=0.5) for name in ("item", "shop")]
    return EmbeddingCollection(
        tables, layout=LAYOUT, optimizer=flexd.Adagrad(lr=0.5), replica_slots=[2 * TABLE_ROWS], average_gradients=False
    )


def move_to_the_other_node(collection: EmbeddingCollection, keys: np.ndarray) -> None:
    delta = Placement.empty().delta_to(Placement.of(keys, (REHOMED + 1 - LAYOUT.home_node(keys)).astype(np.uint8)))
    stored = 4 * 8 + 4 * 8  # values and Adagrad's state
    assert collection.engine.migrator.copied_bytes(delta) == len(keys) * stored, "what paces chunks counts moves"
    offer(collection, delta)
    for _ in range(2):  # to agree on the chunk, and to apply it
        look_up(collection)
    assert collection.engine.migrator.rehomed_rows == len(keys)


def look_up(collection: EmbeddingCollection) -> dict[str, Any]:
    with torch.no_grad():
        return {name: part.values.numpy() for name, part in collection(BOTH).items()}


def whole_tables(collection: EmbeddingCollection) -> dict[str, Any]:
    return {name: collection.gather_table(name).numpy() for name in ("item", "shop")}


def train(collection: EmbeddingCollection) -> None:
    sum((rows.values.sin()).sum() for rows in collection(BOTH).values()).backward()
    collection.optimizer.step()


def load(rank: int) -> list[dict[str, Any]]:
    """Return all tables after training with re-homed rows, after rows of one table were set, after a state was loaded,
    and after a look-up that follows."""
    collection = made()
    kept = collection.state_dict()
    found = [whole_tables(collection)]
    move_to_the_other_node(collection, np.arange(0, 2 * TABLE_ROWS, 3))
    train(collection)
    collection.set_rows("shop", 0, torch.zeros(TABLE_ROWS, 4, dtype=torch.float64))
    found.append(whole_tables(collection))
    train(collection)
    found.append(whole_tables(collection))
    collection.load_state_dict(kept)
    found.append(whole_tables(collection))
    found.append(look_up(collection))
    collection.close()
    return found


def launches_and_waits(rank: int, moves: bool) -> tuple[int, int]:
    """Return what a step launches on an accelerator, and how often the host waits."""
    with mock.patch("flexd.embedding.devices.in_host_memory", return_value=False):
        collection = made()
        if moves:
            move_to_the_other_node(collection, np.arange(0, 2 * TABLE_ROWS, 3))
        for _ in range(2):
            train(collection)
        counting = Counting()
        with counting, counting.host_reads():
            train(collection)
        collection.close()
    return counting.launches.total(), counting.waits.total()


def test_what_is_loaded_replaces_rehomed_rows_and_no_others(ranks: Ranks) -> None:
    for first, set_rows, trained, loaded, looked_up in ranks(2).run(load):
        assert not set_rows["shop"].any()
        assert not np.equal(set_rows["item"], first["item"]).any(), "re-homed rows keep what they learnt"
        assert not np.equal(trained["item"], set_rows["item"]).any()
        for name, table in first.items():
            np.testing.assert_array_equal(loaded[name], table)
            np.testing.assert_array_equal(looked_up[name], table)


def test_the_host_waits_for_nothing_more_where_rows_have_moved(ranks: Ranks) -> None:
    pool = ranks(2)
    for still, moved in zip(pool.run(launches_and_waits, False), pool.run(launches_and_waits, True), strict=True):
        assert moved[1] == still[1]
        assert still[0] < moved[0] <= still[0] + 2 * 22, "22 kernels a station, whatever the tables"
