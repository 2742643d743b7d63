"""Jobs of ranks: migrations and their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flexd.core.errors import ChunkRefusedError, EmbeddingError
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.jagged import Jagged
from flexd.embedding.row_optimizers import RowWiseAdagrad
from flexd.embedding.store.memory import iterate_tensors
from flexd.embedding.store.store import GroupStore
from tests.support import collection_jobs as jobs

TABLES = [
    EmbeddingTable("item", 61, 8, dtype="float32", init_scale=0.5),
    EmbeddingTable("odd", 23, 3, dtype="float16", init_scale=0.5),
]
ROWS = sum(table.rows for table in TABLES)


def _collection(layout: RankLayout, slots: list[int], cap_bytes: int) -> EmbeddingCollection:
    return EmbeddingCollection(
        TABLES, optimizer=RowWiseAdagrad(lr=0.1), layout=layout, replica_slots=slots,
        max_migration_bytes_per_step=cap_bytes,
    )  # fmt: skip


def listed_slots(store: GroupStore) -> list[int]:
    """Slots of the listed rows of a dim-group that are here."""
    keys, _, slots = store.directory.rows()
    inside = (keys >= store.group.first_key) & (keys < store.group.end_key)
    return list(slots[inside & (slots >= 0)].tolist())


def follow_chunks(rank: int, layout: RankLayout, chunks: list[Delta], slots: list[int], cap: int, seed: int) -> Any:
    """Receive the chunks at random times while looking rows up; return the state once all are applied."""
    collection = _collection(layout, slots, cap)
    engine = collection.engine
    stores = engine.stores
    everything = {table.name: Jagged(torch.arange(table.rows), torch.tensor([table.rows])) for table in TABLES}
    # After training, each row has a different value and state, which the copies must have, too.
    for step in range(2):
        sum((jagged.values.float() * (step + 1)).sin().sum() for jagged in collection(everything).values()).backward()
        collection.optimizer.step()
    before = {table.name: collection.gather_table(table.name) for table in TABLES}
    held = [(store.rows.data_ptr(), store.state.data_ptr(), store.rows.shape, store.state.shape) for store in stores]
    fixed = collection.memory()
    rng = np.random.default_rng([seed, rank])
    offered, steps, largest, left_out = 0, 0, 0, 0
    while collection.placement_version < len(chunks):
        for _ in range(int(rng.integers(0, 4))):
            if offered < len(chunks):
                offered += 1
                engine.inbox.offer(offered, chunks[offered - 1])
        with torch.no_grad():
            looked_up = collection(everything)
        memory = collection.memory()
        largest = max(largest, memory.stored_bytes + memory.pending_bytes)
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in iterate_tensors([engine.router, engine.sync, stores])
        }
        left_out = max(left_out, sum(storages.values()) - memory.stored_bytes)
        assert all(torch.equal(looked_up[name].values, table) for name, table in before.items()), "a look-up changed"
        steps += 1
    keys, tiers = engine.migrator.placement()
    slots_by_key = [listed_slots(store) for store in stores]
    memory = collection.memory()
    return {
        "keys": keys, "tiers": tiers, "digest": engine.migrator.digest, "steps": steps,
        "free": [store.free_slots for store in stores],
        "slots_distinct": all(len(set(slots)) == len(slots) for slots in slots_by_key),
        "tables_unchanged": all(torch.equal(collection.gather_table(name), table) for name, table in before.items()),
        "bit_equal": collection.replicas_bit_equal(),
        "same_tensors": held
        == [(store.rows.data_ptr(), store.state.data_ptr(), store.rows.shape, store.state.shape) for store in stores],
        "memory_constant": (fixed.home_bytes, fixed.replica_bytes, fixed.free_list_bytes)
        == (memory.home_bytes, memory.replica_bytes, memory.free_list_bytes),
        "within": largest <= memory.budget_bytes and memory.directory_bytes <= memory.max_directory_bytes,
        "all_counted": left_out <= 0, "memory": memory,
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
    try:
        inbox.offer(len(good), wrong)
        text = "accepted"
    except ChunkRefusedError as error:
        text = str(error)
        inbox.offer(len(good), good[-1])
    with torch.no_grad():
        for _ in range(2):
            collection(nothing)
    return text, text == "accepted" or (collection.placement_version == len(good) and collection.replicas_bit_equal())


def refresh_in_blocks(rank: int, layout: RankLayout, delta: Delta, cap: int) -> dict[str, Any]:
    """Load other home rows under replicas of many rows, with room for a few in the buffer."""
    collection, other = _collection(layout, [61, 23], cap), _collection(layout, [61, 23], cap)
    for made in (collection, other):
        made.engine.inbox.offer(1, delta)
    largest: list[int] = []
    everything = {table.name: Jagged(torch.arange(table.rows), torch.tensor([table.rows])) for table in TABLES}
    with torch.no_grad():
        for _ in range(2):
            collection(everything)
        for store in other.engine.stores:
            store.rows.add_(1)
        collection.load_state_dict(other.state_dict())
        for peers in (collection._groups.rail, collection._groups.node):
            gather = peers.all_gather
            peers.all_gather = lambda part, gather=gather: (largest.append(part.numel()), gather(part))[1]  # type: ignore[method-assign]
        looked_up = collection(everything)
    gathers = list(largest)
    return {
        "bit_equal": collection.replicas_bit_equal(), "largest": max(gathers, default=0), "gathers": len(gathers),
        "right": all(torch.equal(looked_up[t.name].values, other.gather_table(t.name)) for t in TABLES),
    }  # fmt: skip


def chunk_in_inference_mode(rank: int, layout: RankLayout, delta: Delta) -> bool:
    """Apply a chunk inside ``torch.inference_mode`` and continue training."""
    collection = EmbeddingCollection(jobs.tables(), layout=layout, replica_slots=[60, 23, 3])
    jobs.offer(collection, delta)
    with torch.inference_mode():
        for _ in range(2):
            collection(jobs.everything())
    for step in range(2):
        jobs.train_step(collection, jobs.some(0, step, rank))
    return collection.placement_version == 1 and collection.replicas_bit_equal()


def fault_beside_a_chunk(rank: int, layout: RankLayout, delta: Delta, faulty: int) -> list[tuple[int, int, bool]]:
    """Pass invalid input on one rank in the exchange that agrees on a chunk."""
    collection = EmbeddingCollection(jobs.tables(), layout=layout, replica_slots=[60, 23, 3])
    jobs.offer(collection, delta)
    states = []
    bad = {"item": Jagged(torch.tensor([-1]), torch.tensor([1]))}
    try:
        collection(bad if rank == faulty else jobs.everything())
        raise AssertionError("no error")
    except EmbeddingError:
        states.append(
            (collection.engine.inbox.agreed_version, collection.placement_version, len(collection.engine.passes) == 0)
        )
    jobs.train_step(collection, jobs.everything())
    states.append(
        (collection.engine.inbox.agreed_version, collection.placement_version, collection.replicas_bit_equal())
    )
    return states
