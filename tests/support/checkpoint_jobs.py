"""Jobs of ranks: saving and loading checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from flexd.core.errors import CheckpointError
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.checkpoint import checkpoint
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.jagged import Jagged
from flexd.embedding.row_optimizers import SGD, Adam, RowOptimizer, RowWiseAdagrad
from tests.support.collection_jobs import ROWS, loss_of, offer, some, tables, train_step

OPTIMIZERS: dict[str, RowOptimizer] = {
    "sgd": SGD(0.1),
    "adam": Adam(0.05),
    "rowwise_adagrad": RowWiseAdagrad(0.1, initial_accumulator_value=0.1),
}
SAMPLES = 4


def make(layout: RankLayout, optimizer: str, seed: int, dtype: str = "float64") -> EmbeddingCollection:
    return EmbeddingCollection(
        tables(dtype), optimizer=OPTIMIZERS[optimizer], layout=layout, replica_slots=[61, 23, 3],
        average_gradients=False, seed=seed,
    )  # fmt: skip


def share(step: int, rank: int, world_size: int) -> dict[str, Jagged]:
    """Return this rank's part of a batch that is equal for any number of ranks."""
    parts = [some(0, step, sample) for sample in range(SAMPLES) if sample % world_size == rank]
    out = {}
    for name in ROWS:
        ids = torch.cat([part[name].values for part in parts]) if parts else torch.arange(0)
        out[name] = Jagged(ids, torch.tensor([len(ids)]))
    return out


def train_steps(collection: EmbeddingCollection, first: int, steps: int) -> bool:
    """Train, and return whether the replicas equalled their home copies after every step."""
    equal = True
    for step in range(first, first + steps):
        train_step(collection, share(step, collection.rank, collection.layout.world_size))
        equal &= collection.replicas_bit_equal()
    return equal


def as_numpy(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {key: value.view(torch.uint8).numpy() if value.dim() else value.numpy() for key, value in state.items()}


def whole(collection: EmbeddingCollection) -> dict[str, np.ndarray]:
    """Return all tables and state as bytes."""
    return as_numpy(checkpoint.whole_state_dict(collection))


def save(
    rank: int, layout: RankLayout, optimizer: str, path: str, delta: Delta, window_bytes: int, dtype: str = "float64"
) -> dict[str, Any]:
    """Train with replicas, save, and continue training."""
    checkpoint_windows(window_bytes)
    collection = make(layout, optimizer, 1, dtype)
    offer(collection, delta)
    train_steps(collection, 0, 4)
    checkpoint.save_checkpoint(collection, path)
    saved = whole(collection)
    train_steps(collection, 4, 4)
    return {"saved": saved, "end": tables_of(collection), "steps": collection.steps}


def load(
    rank: int, layout: RankLayout, optimizer: str, path: str, delta: Delta, window_bytes: int, dtype: str = "float64"
) -> dict[str, Any]:
    """Load over other values, steps and replicas, and continue training like ``save``."""
    checkpoint_windows(window_bytes)
    collection = make(layout, optimizer, 2, dtype)
    offer(collection, delta)
    train_steps(collection, 100, 3)
    checkpoint.load_checkpoint(collection, path)
    loaded, version = whole(collection), collection.placement_version
    equal = train_steps(collection, 4, 4)
    return {
        "loaded": loaded, "end": tables_of(collection), "steps": collection.steps, "equal": equal, "version": version,
        "replicas": sum(len(store.directory) for store in collection.engine.stores),
    }  # fmt: skip


def checkpoint_windows(window_bytes: int) -> None:
    """Set a small window, so that a block takes several."""
    from flexd.embedding.checkpoint import blocks

    blocks.MAX_WINDOW_BYTES = window_bytes


def tables_of(collection: EmbeddingCollection) -> dict[str, np.ndarray]:
    return {name: collection.gather_table(name).double().numpy() for name in ROWS}


def beside_a_model(rank: int, layout: RankLayout, path: str) -> bool:
    """Save a collection and a model with one ``dcp.save``."""
    model = torch.nn.Linear(2, 2)
    old, new = make(layout, "adam", 1), make(layout, "adam", 2)
    train_steps(old, 0, 2)
    dcp.save({"model": model.state_dict(), "tables": checkpoint.ShardedState(old)}, checkpoint_id=path)
    expected = whole(old)
    train_steps(new, 7, 1)
    other = torch.nn.Linear(2, 2).state_dict()
    dcp.load({"model": other, "tables": checkpoint.ShardedState(new)}, checkpoint_id=path)
    loaded = whole(new)
    # Every rank has a model of its own; the first one is saved.
    return all(np.array_equal(loaded[key], expected[key]) for key in expected) and new.steps == 2


def load_into(
    rank: int, layout: RankLayout, path: str, specs: list[EmbeddingTable], optimizer: str
) -> tuple[str, bool]:
    """Return the error of a collection that does not fit, and whether it is unchanged."""
    collection = EmbeddingCollection(specs, optimizer=OPTIMIZERS[optimizer], layout=layout)
    before = whole(collection)
    try:
        checkpoint.load_checkpoint(collection, path)
        text = "loaded"
    except CheckpointError as error:
        text = str(error)
    after = whole(collection)
    return text, all(np.array_equal(before[key], after[key]) for key in before)


def load_changed(rank: int, layout: RankLayout, change: str) -> tuple[str, bool]:
    """Load a state that was changed on one rank after saving."""
    checkpoint_windows(300)
    collection = make(layout, "adam", 1)
    train_steps(collection, 0, 2)
    state = checkpoint.sharded_state_dict(collection)
    before = whole(collection)
    if rank == layout.world_size - 1:
        if change == "one bit":
            bits = state["optimizer.adam.item.exp_avg"].to_local().view(torch.uint8)
            bits[1, 3] ^= 4
        elif change == "two rows":
            rows = state["embeddings.item.weight"].to_local()
            rows[:2] = rows[[1, 0]]
        elif change == "a table":
            del state["embeddings.odd.weight"]
    try:
        checkpoint.load_sharded_state_dict(collection, state)
        text = "loaded"
    except CheckpointError as error:
        text = str(error)
    after = whole(collection)
    return text, all(np.array_equal(before[key], after[key]) for key in before)


def plain_tables(rank: int, layout: RankLayout) -> dict[str, Any]:
    """Export plain tables and load them into a collection that was trained on other values."""
    first, second, third = (make(layout, "adam", seed) for seed in (1, 2, 3))
    train_steps(first, 0, 3)
    state = checkpoint.whole_state_dict(first)
    modules = {
        name: torch.nn.Embedding(rows, state[f"embeddings.{name}.weight"].shape[1]) for name, rows in ROWS.items()
    }
    plain = torch.nn.ModuleDict({"embeddings": torch.nn.ModuleDict(modules)}).double()
    plain.load_state_dict({key: value for key, value in state.items() if key.startswith("embeddings.")})
    train_steps(second, 5, 2)
    checkpoint.load_whole_state_dict(second, {f"old.{key}": value for key, value in state.items()}, "old.")
    same = whole(second)
    expected = as_numpy(state)
    train_steps(third, 5, 2)
    checkpoint.load_whole_state_dict(third, plain.state_dict())
    fresh = whole(third)
    del state["optimizer.adam.odd.exp_avg"]
    try:
        checkpoint.load_whole_state_dict(third, state)
        text = "loaded"
    except CheckpointError as error:
        text = str(error)
    return {
        "same": all(np.array_equal(same[key], expected[key]) for key in expected) and second.steps == 3,
        "weights": all(np.array_equal(fresh[key], expected[key]) for key in expected if key.startswith("embeddings.")),
        "state": any(fresh[key].any() for key in expected if key.startswith("optimizer.")), "steps": third.steps,
        "text": text,
    }  # fmt: skip


def loss(collection: EmbeddingCollection, step: int) -> float:
    return float(loss_of(collection(share(step, collection.rank, collection.layout.world_size))))


def saved_keys(rank: int, layout: RankLayout) -> list[str]:
    checkpoint_windows(2**20)
    return list(checkpoint.sharded_state_dict(make(layout, "adam", 1)))
