"""Programs that the ranks of the collection's tests run, beside ``exactness``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flexd
from flexd.core.errors import EmbeddingError, FlexdError, TopologyError
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta, Placement
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.jagged import Jagged
from flexd.embedding.row_optimizers import SGD, RowWiseAdagrad

ROWS = {"item": 61, "odd": 23, "tiny": 3}
"""``tiny`` has fewer rows than a world of four ranks."""


def tables(dtype: str = "float64", names: tuple[str, ...] = tuple(ROWS)) -> list[EmbeddingTable]:
    dims = {"item": 8, "odd": 3, "tiny": 2}
    return [EmbeddingTable(name, ROWS[name], dims[name], dtype=dtype, init_scale=0.5) for name in names]


def everything() -> dict[str, Jagged]:
    """Each row of each table once."""
    return {name: Jagged(torch.arange(rows), torch.tensor([rows])) for name, rows in ROWS.items()}


def some(seed: int, step: int, rank: int) -> dict[str, Jagged]:
    """Skewed ids of every table; now and then none."""
    rng = np.random.default_rng([seed, step, rank])
    out = {}
    for name, rows in ROWS.items():
        count = int(rng.integers(0, 40))
        ids = torch.from_numpy((rng.zipf(1.3, count) - 1) % rows)
        out[name] = Jagged(ids, torch.tensor([count]))
    return out


def loss_of(out: dict[str, Jagged]) -> torch.Tensor:
    return torch.stack([jagged.values.double().sin().sum() for jagged in out.values()]).sum()


def train_step(collection: EmbeddingCollection, features: dict[str, Jagged]) -> None:
    loss_of(collection(features)).backward()
    collection.optimizer.step()


def offer(collection: EmbeddingCollection, delta: Delta) -> None:
    collection.engine.inbox.offer(collection.engine.inbox._received_version + 1, delta)


def look_everything_up(collection: EmbeddingCollection) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return {name: jagged.values.numpy() for name, jagged in collection(everything()).items()}


def follow(rank: int, layout: RankLayout, deltas: list[Delta], slots: list[int]) -> list[dict[str, Any]]:
    """Offer a chunk, train a step and return the rows of this rank; for every chunk."""
    collection = EmbeddingCollection(tables(), optimizer=RowWiseAdagrad(lr=0.1), layout=layout, replica_slots=slots)
    train_step(collection, some(0, 999, rank))
    said = []
    for step, delta in enumerate(deltas):
        offer(collection, delta)
        train_step(collection, some(0, step, rank))
        unequal_before = not collection.replicas_bit_equal()
        looked_up = look_everything_up(collection)  # applies the chunk
        keys, tiers = collection.engine.migrator.placement()
        whole = {name: collection.gather_table(name).numpy() for name in ROWS}
        listed = [store.directory for store in collection.engine.stores]
        said.append(
            {
                "version": collection.placement_version, "digest": collection.engine.migrator.digest,
                "keys": keys, "tiers": tiers, "free": [store.free_slots for store in collection.engine.stores],
                "slots_distinct": all(len(set(d.slots_at(torch.arange(len(d))).tolist())) == len(d) for d in listed),
                "lookups_right": all(np.array_equal(looked_up[name], whole[name]) for name in ROWS),
                "bit_equal": collection.replicas_bit_equal() and not unequal_before,
            }
        )  # fmt: skip
    return said


def wrong_chunk(rank: int, layout: RankLayout, good: Delta, wrong: Delta) -> tuple[str, bool]:
    """Return the error of a chunk that does not start from the placement, and whether the collection is unchanged."""
    collection = EmbeddingCollection(tables(), layout=layout, replica_slots=[30, 30, 3])
    offer(collection, good)
    look_everything_up(collection)
    look_everything_up(collection)
    before = [store.free_slots for store in collection.engine.stores], collection.engine.migrator.digest
    try:
        collection.engine.migrator.prepare(wrong, None)
        text = "applied"
    except FlexdError as error:
        text = f"{type(error).__name__}: {error}"
    after = [store.free_slots for store in collection.engine.stores], collection.engine.migrator.digest
    return text, before == after and collection.replicas_bit_equal()


def save_and_load(rank: int, layout: RankLayout, first: Delta, second: Delta, pending: bool) -> dict[str, Any]:
    """Trains, saves, loads into a collection that has other values and another placement, and trains both on."""

    def make(seed: int, delta: Delta) -> EmbeddingCollection:
        made = EmbeddingCollection(
            tables(), optimizer=RowWiseAdagrad(lr=0.1), layout=layout, replica_slots=[40, 23, 3], seed=seed
        )
        offer(made, delta)
        for step in range(3):
            train_step(made, some(seed, step, rank))
        return made

    old, new = make(1, first), make(2, second)
    saved = old.state_dict()
    kept = loss_of(new(some(5, 0, rank))) if pending else None
    new.load_state_dict(saved)
    looked_up, expected = look_everything_up(new), look_everything_up(old)
    equal = [new.replicas_bit_equal()]
    if kept is not None:
        kept.backward()
        new.optimizer.step()
        equal.append(new.replicas_bit_equal())
    for step in range(3):
        for collection in (old, new):
            train_step(collection, some(3, step, rank))
        equal.append(new.replicas_bit_equal())
    tier = new.engine.migrator.placement()[1]
    return {
        "lookups_right": all(np.array_equal(looked_up[name], expected[name]) for name in ROWS),
        "bit_equal": equal, "replicas": len(tier),
        "difference": max(
            float((old.gather_table(name) - new.gather_table(name)).abs().max()) for name in ROWS
        ),
    }  # fmt: skip


def load_of_another_rank(rank: int, layout: RankLayout) -> str:
    """``item`` of 64 rows is equally large on all ranks: nothing but the shard tells whose they are."""
    collection = EmbeddingCollection([EmbeddingTable("item", 64, 2)], layout=layout)
    state = collection.state_dict()
    holder = [torch.empty_like(value) for value in state.values()]
    for value, part in zip(state.values(), holder, strict=True):
        part.copy_(value)
        dist.broadcast(part, src=0)
    try:
        collection.load_state_dict(dict(zip(state, holder, strict=True)))
    except RuntimeError as error:
        return str(error)
    return "loaded"


def evaluate(rank: int, layout: RankLayout, delta: Delta) -> dict[str, Any]:
    """Evaluation on replicated tables: what it sends and what it leaves behind."""
    collection = EmbeddingCollection(tables(), layout=layout, replica_slots=[60, 23, 3])
    offer(collection, delta)
    look_everything_up(collection)
    look_everything_up(collection)
    before, tables_before = collection.traffic.totals(), collection.gather_table("item")
    collection.eval()
    for step in range(70):
        collection(some(0, step, rank))
    collection.train()
    with torch.inference_mode():
        collection(some(0, 1, rank))
    collection.optimizer.step()
    after = collection.traffic.totals()
    return {
        "synced": sum(after[name] - before[name] for name in after if name.startswith("sync")),
        "device_accesses": after["device_accesses"] - before["device_accesses"],
        "steps": collection.steps, "pending": len(collection.engine.passes),
        "unchanged": torch.equal(tables_before, collection.gather_table("item")),
    }  # fmt: skip


def chunk_in_inference_mode(rank: int, layout: RankLayout, delta: Delta) -> bool:
    """Applies a chunk inside ``torch.inference_mode`` and trains on."""
    collection = EmbeddingCollection(tables(), layout=layout, replica_slots=[60, 23, 3])
    offer(collection, delta)
    with torch.inference_mode():
        for _ in range(2):
            collection(everything())
    for step in range(2):
        train_step(collection, some(0, step, rank))
    return collection.placement_version == 1 and collection.replicas_bit_equal()


def construct(rank: int, arguments: list[dict[str, Any]]) -> str:
    """Construct a collection on each rank with its own arguments; return the error."""
    given = {"tables": [EmbeddingTable("item", 64, 2)], "layout": RankLayout(2, 2)} | arguments[rank]
    try:
        EmbeddingCollection(**given)
    except (TopologyError, EmbeddingError) as error:
        return f"{type(error).__name__}: {error}"
    return "constructed"


def fault_beside_a_chunk(rank: int, layout: RankLayout, delta: Delta, guilty: int) -> list[tuple[int, int, bool]]:
    """One rank has bad input in the very exchange that agrees on a chunk."""
    collection = EmbeddingCollection(tables(), layout=layout, replica_slots=[60, 23, 3])
    offer(collection, delta)
    said = []
    bad = {"item": Jagged(torch.tensor([-1]), torch.tensor([1]))}
    try:
        collection(bad if rank == guilty else everything())
        raise AssertionError("no error")
    except EmbeddingError:
        said.append(
            (collection.engine.inbox.agreed_version, collection.placement_version, len(collection.engine.passes) == 0)
        )
    train_step(collection, everything())
    said.append((collection.engine.inbox.agreed_version, collection.placement_version, collection.replicas_bit_equal()))
    return said


def count_bytes(rank: int, layout: RankLayout, exchange: str, delta: Delta, steps: int) -> list[dict[str, int]]:
    """Traffic on table ``item``: of two look-ups of nothing that agree on a chunk and apply it, then of each step."""
    collection = EmbeddingCollection(tables("float32", ("item",)), layout=layout, exchange=exchange, replica_slots=[61])
    built = collection.traffic.totals()
    assert not any(built.values()), "construction is not training"
    offer(collection, delta)
    only = {"item": Jagged(torch.arange(0), torch.tensor([0]))}
    with torch.no_grad():
        for _ in range(2):
            collection(only)
    said = [collection.traffic.totals()]
    for step in range(steps):
        before = collection.traffic.totals()
        train_step(collection, {"item": some(0, step, rank)["item"]})
        collection.gather_table("item")
        collection.replicas_bit_equal()
        after = collection.traffic.totals()
        said.append({name: after[name] - before[name] for name in after})
    return said


class Tower(nn.Module):
    """A dense layer; with ``collection`` the tables inside the module, as many trainers have it."""

    def __init__(self, collection: EmbeddingCollection | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.dense = nn.Linear(8, 4, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.dense.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        self.collection = collection

    def forward(self, given: Any) -> torch.Tensor:
        rows = given if self.collection is None else self.collection(given)["item"].values
        return self.dense(rows.tanh()).square().sum()


def ddp(rank: int, layout: RankLayout, inside: bool, steps: int) -> dict[str, np.ndarray]:
    """A dense part in DDP, the tables beside it or inside."""
    collection = EmbeddingCollection(tables(names=("item",)), optimizer=SGD(0.05), layout=layout, replica_slots=[61])
    model = DistributedDataParallel(Tower(collection if inside else None))
    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        features = {"item": some(0, step, rank)["item"]}
        if step == 1:
            offer(collection, Delta(np.arange(20), np.zeros(20, np.uint8), np.arange(20, dtype=np.uint8) % 2 + 1))
        loss = model(features if inside else collection(features)["item"].values)
        dense_optimizer.zero_grad()
        collection.optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        collection.optimizer.step()
    assert collection.placement_version == 1
    module = model.module
    return {"item": collection.gather_table("item").numpy(), "dense": module.dense.weight.detach().numpy()}


def ddp_alone(world_size: int, steps: int) -> dict[str, np.ndarray]:
    start = EmbeddingCollection(tables(names=("item",)), layout=RankLayout(1, 1))
    table, tower = nn.Embedding.from_pretrained(start.initial_table("item"), freeze=False), Tower()
    optimizer = torch.optim.SGD([*table.parameters(), *tower.parameters()], lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            (tower(table(some(0, step, rank)["item"].values)) / world_size).backward()
        optimizer.step()
    return {"item": table.weight.detach().numpy(), "dense": tower.dense.weight.detach().numpy()}


def connected(rank: int, layout: RankLayout, port: int, digest: int, limit: int) -> dict[str, Any]:
    """Trains with a real agent until all ranks have the placement of this digest, and three steps more."""
    collection = EmbeddingCollection(
        tables(), optimizer=RowWiseAdagrad(lr=0.1), layout=layout, replica_slots=[61, 23, 3]
    )
    connection = flexd.connect(collection, f"127.0.0.1:{port}", job="job", timeout_seconds=5.0)
    versions, equal, step, left = [], True, 0, 3
    while step < limit and left:
        train_step(collection, some(0, step, rank))
        equal &= collection.replicas_bit_equal()
        versions.append(collection.placement_version)
        step += 1
        left -= int(
            collection.engine.migrator.digest == digest
        )  # equal on all ranks: they apply chunks at the same step
    out = {
        "steps": step, "versions": versions, "bit_equal": equal, "digest": collection.engine.migrator.digest,
        "listed": collection.engine.migrator.placement(), "state": connection.agent.state,
        "tables": {name: collection.gather_table(name).numpy() for name in ROWS},
        "accesses": sum(collection.traffic.totals()[f"{tier}_accesses"] for tier in ("home", "node", "device")),
    }  # fmt: skip
    connection.close(5.0)
    return out


def connected_alone(world_size: int, steps: int) -> dict[str, np.ndarray]:
    """The tables that ``connected`` must end with, from plain tables and the formula of row-wise Adagrad."""
    start = EmbeddingCollection(tables(), layout=RankLayout(1, 1))
    weights = {name: start.initial_table(name) for name in ROWS}
    total = {name: torch.zeros(rows, 1, dtype=torch.float64) for name, rows in ROWS.items()}
    for step in range(steps):
        grads = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for rank in range(world_size):
            for name, jagged in some(0, step, rank).items():
                grads[name].index_add_(0, jagged.values, weights[name][jagged.values].cos() / world_size)
        for name, grad in grads.items():
            total[name] += grad.square().mean(dim=1, keepdim=True)
            weights[name] = weights[name] - 0.1 * grad / (total[name].sqrt() + 1e-8)
    return {name: weight.numpy() for name, weight in weights.items()}


def listed_by(layout: RankLayout, rank: int, placement: Placement) -> Placement:
    """Return the rows of a placement that a rank's directory lists."""
    keys, tiers = placement.keys, placement.tiers
    mine = ((tiers == 1) & (keys % layout.local_ranks == layout.local_rank_of(rank)) & (layout.nodes > 1)) | (
        (tiers == 2) & (layout.world_size > 1)
    )
    return Placement(keys[mine], tiers[mine], placement.version)


def shared_groups(rank: int, layout: RankLayout) -> tuple[bool, bool]:
    """Return whether two collections share the trainer's process groups and train equally beside each other."""
    first, second = (EmbeddingCollection(tables(), layout=layout, replica_slots=[20, 20, 3]) for _ in range(2))
    same = all(
        getattr(first.engine.groups, name).group is getattr(second.engine.groups, name).group
        for name in ("world", "node", "rail")
    )
    for step in range(3):
        for collection in (first, second):
            train_step(collection, some(0, step, rank))
    equal = all(torch.equal(first.gather_table(name), second.gather_table(name)) for name in ROWS)
    return same, equal
