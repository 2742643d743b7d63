"""Jobs of ranks: collectives, bytes and sums of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import flexd.embedding.exchange.collectives as collectives_module
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.jagged import Jagged
from flexd.embedding.row_optimizers import SGD
from tests.support.collection_jobs import offer, some, tables, train_step

ROWS = 40


def make(layout: RankLayout, dims: list[int], dtypes: list[str], moved: bool, **more: Any) -> EmbeddingCollection:
    tables = [
        EmbeddingTable(f"t{i}", ROWS, d, dtype=t, init_scale=0.5)
        for i, (d, t) in enumerate(zip(dims, dtypes, strict=True))
    ]
    collection = EmbeddingCollection(tables, layout=layout, optimizer=SGD(0.02), replica_fraction=1.0, **more)
    if moved:
        keys = np.arange(ROWS * len(dims))
        collection.engine.inbox.offer(1, Delta(keys, np.zeros(len(keys), np.uint8), (keys % 3).astype(np.uint8)))
        with torch.no_grad():
            for _ in range(2):
                collection({})
    return collection


def batch(collection: EmbeddingCollection, seed: int) -> dict[str, Jagged]:
    rng = np.random.default_rng([seed, collection.rank])
    return {
        table.name: Jagged(torch.from_numpy((rng.zipf(1.3, 30) - 1) % ROWS), torch.tensor([30]))
        for table in collection.tables
    }


def step(collection: EmbeddingCollection, seeds: list[int]) -> float:
    losses = []
    for seed in seeds:
        loss = torch.stack([j.values.double().sin().sum() for j in collection(batch(collection, seed)).values()]).sum()
        loss.backward()
        losses.append(float(loss.detach()))
    collection.optimizer.step()
    return sum(losses)


def collectives(rank: int, layout: RankLayout, dims: list[int], dtypes: list[str], moved: bool) -> dict[str, Any]:
    """Count all-to-alls, all-reduces and broadcasts of a training step, and of an evaluation."""
    collection = make(layout, dims, dtypes, moved)
    names = ("all_to_all_single", "all_reduce", "broadcast")
    originals, count = {name: getattr(dist, name) for name in names}, dict.fromkeys(names, 0)

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, counted(name))
        step(collection, [1])
        trained = list(count.values())
        count.update(dict.fromkeys(names, 0))
        with torch.no_grad():
            collection(batch(collection, 1))
    finally:
        for name in names:
            setattr(dist, name, originals[name])
    return {"training": trained, "evaluation": list(count.values())}


def collectives_of_a_chunk(rank: int, layout: RankLayout, dims: list[int], trains: bool) -> dict[str, Any]:
    """Count the collectives of a pass that applies a chunk, and of one after it; rows are listed before both.

    Returns:
        Of both the collectives by name, and after both whether all replicas are bit-equal; the bytes that the first
        sent for migrations; whether its rows are those of a pass without a chunk.
    """
    collection = make(layout, dims, ["float32"] * len(dims), True)
    step(collection, [1])
    collection.engine.inbox.offer(2, promotions(collection))
    with torch.no_grad():
        before = [jagged.values for jagged in collection(batch(collection, 1)).values()]  # agrees on the chunk
    names = {"all_to_all_single": dist, "all_reduce": dist, "broadcast": dist, "all_gather_flat": collectives_module}
    originals, count = {name: getattr(owner, name) for name, owner in names.items()}, dict.fromkeys(names, 0)

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return originals[name](*args, **kwargs)

        return call

    found: list[dict[str, int]] = []
    bit_equal, versions = [], []
    sent = collection.traffic.totals()
    equal = False
    for _ in range(2):
        count.update(dict.fromkeys(names, 0))
        try:
            for name, owner in names.items():
                setattr(owner, name, counted(name))
            if trains:
                step(collection, [1])
            else:
                with torch.no_grad():
                    rows = [jagged.values for jagged in collection(batch(collection, 1)).values()]
                equal = all(map(torch.equal, rows, before))
        finally:
            for name, owner in names.items():
                setattr(owner, name, originals[name])
        found.append(dict(count))
        versions.append(collection.placement_version)
        bit_equal.append(collection.replicas_bit_equal())
    moved = {name: collection.traffic.totals()[name] - sent[name] for name in sent if name.startswith("migration")}
    return {
        "collectives": found, "bit_equal": bit_equal, "equal": equal, "migrated": sum(moved.values()),
        "versions": versions, "listed": len(collection.engine.migrator.placement()[0]),
    }  # fmt: skip


def promotions(collection: EmbeddingCollection) -> Delta:
    """Make a chunk that promotes all rows that ``make`` has moved, and those it has not, to DEVICE."""
    keys = np.arange(collection.engine.keyspace.total_rows)
    old = (keys % 3).astype(np.uint8)
    return Delta(keys[old < 2], old[old < 2], np.full(int((old < 2).sum()), 2, np.uint8))


def summed_gradients(
    rank: int,
    layout: RankLayout,
    tier: int | None,
    dtype: str,
    comm_dtype: str | None,
    replica_sums: str = "all_reduce",
) -> tuple[np.ndarray, bool]:
    """Return the table after one step from zero, which is the sum of all gradients, and whether replicas are equal.

    Two ranks have large gradients of opposite sign for each number, and the others small ones: another order of
    additions loses another part of the small ones.

    Args:
        tier: tier of all rows; None: rows at all tiers.
    """
    collection = EmbeddingCollection(
        [EmbeddingTable("t0", ROWS, 16, dtype=dtype)], layout=layout, optimizer=SGD(1.0), replica_fraction=1.0,
        comm_dtype=comm_dtype, replica_sums=replica_sums, average_gradients=False,
    )  # fmt: skip
    collection.load_rows("t0", 0, torch.zeros(ROWS, 16))
    keys = np.arange(ROWS)
    tiers = keys % 3 if tier is None else np.full(ROWS, tier)
    moved = tiers > 0
    delta = Delta(keys[moved], np.zeros(int(moved.sum()), np.uint8), tiers[moved].astype(np.uint8))
    collection.engine.inbox.offer(1, delta)
    with torch.no_grad():
        for _ in range(2):
            collection({})
    assert collection.placement_version == 1
    rng = np.random.default_rng(1)
    by_rank = rng.normal(size=(layout.world_size, ROWS, 16))
    large = rng.permuted(np.broadcast_to(np.arange(layout.world_size)[:, None, None], by_rank.shape), axis=0)
    by_rank[large == 0] = 2.0 ** (15 if "float16" in (dtype, comm_dtype) else 20)
    by_rank[large == 1] = -by_rank[large == 0].max()
    weights = torch.from_numpy(by_rank[rank])
    rows = collection({"t0": Jagged(torch.arange(ROWS), torch.tensor([ROWS]))})["t0"].values
    (rows * weights.to(rows.dtype)).sum().backward()
    collection.optimizer.step()
    return collection.gather_table("t0").float().numpy(), collection.replicas_bit_equal()


def train(rank: int, layout: RankLayout, moved: bool, comm_dtype: str | None) -> dict[str, Any]:
    collection = make(layout, [8, 3], ["float32", "float64"], moved, comm_dtype=comm_dtype)
    losses, equal = [], True
    for number in range(8):
        losses.append(step(collection, [number, number + 100]))
        equal &= collection.replicas_bit_equal()
    totals = collection.traffic.totals()
    return {
        "losses": losses, "equal": equal, "bytes": sum(value for name, value in totals.items() if "bytes" in name),
        "tables": [collection.gather_table(table.name).double().numpy() for table in collection.tables],
    }  # fmt: skip


def count_bytes(rank: int, layout: RankLayout, exchange: str, delta: Delta, steps: int) -> list[dict[str, int]]:
    """Return the traffic of two empty look-ups, which agree on a chunk and apply it, and then of each step."""
    collection = EmbeddingCollection(tables("float32", ("item",)), layout=layout, exchange=exchange, replica_slots=[61])
    built = collection.traffic.totals()
    assert not any(built.values()), "construction is not training"
    offer(collection, delta)
    no_ids = {"item": Jagged(torch.arange(0), torch.tensor([0]))}
    with torch.no_grad():
        for _ in range(2):
            collection(no_ids)
    traffic = [collection.traffic.totals()]
    for step in range(steps):
        before = collection.traffic.totals()
        train_step(collection, {"item": some(0, step, rank)["item"]})
        collection.gather_table("item")
        collection.replicas_bit_equal()
        after = collection.traffic.totals()
        traffic.append({name: after[name] - before[name] for name in after})
    return traffic
