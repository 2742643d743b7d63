"""Jobs of ranks: saving and loading checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from flexd.core.errors import CheckpointError
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.checkpoint import blocks, checkpoint
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


def save_twice(rank: int, layout: RankLayout, path: str) -> str:
    collection = make(layout, "sgd", 1)
    checkpoint.save_checkpoint(collection, path)
    try:
        checkpoint.save_checkpoint(collection, path)
    except CheckpointError as error:
        return str(error)
    return "saved"


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


def load_whole(rank: int, layout: RankLayout, optimizer: str, delta: Delta, with_state: bool) -> dict[str, Any]:
    """Load whole tables into a collection with replicas, and train on beside a collection without any."""
    source, loaded = (make(layout, optimizer, seed) for seed in (1, 2))
    train_steps(source, 0, 3)
    state = checkpoint.whole_state_dict(source)
    offer(loaded, delta)
    train_steps(loaded, 5, 2)
    if with_state:
        reference = source
    else:
        reference = make(layout, optimizer, 3)
        state = {key: value for key, value in state.items() if key.startswith("embeddings.")}
        for name in ROWS:
            reference.load_rows(name, 0, state[f"embeddings.{name}.weight"])
    replicas = sum(len(store.directory) for store in loaded.engine.stores)
    checkpoint.load_whole_state_dict(loaded, state)
    at_start = {key: value.numpy() for key, value in checkpoint.whole_state_dict(loaded).items()}
    expected_at_start = {key: value.numpy() for key, value in checkpoint.whole_state_dict(reference).items()}
    equal = train_steps(loaded, 10, 3)
    train_steps(reference, 10, 3)
    return {
        "replicas": replicas, "at_start": at_start, "expected_at_start": expected_at_start, "equal": equal,
        "end": tables_of(loaded), "expected_end": tables_of(reference),
    }  # fmt: skip


def missing_file(rank: int, layout: RankLayout, path: str, damage: str) -> str:
    """Load a checkpoint that was damaged after it was saved."""
    collection = make(layout, "adam", 1)
    checkpoint.save_checkpoint(collection, path)
    files = sorted(Path(path).glob("*.distcp"))
    if layout.world_size > 1:
        torch.distributed.barrier()
    if rank == 0:
        if damage == "metadata":
            Path(path, ".metadata").unlink()
        elif damage == "file":
            files[-1].unlink()
        else:
            os.truncate(files[-1], files[-1].stat().st_size // 2)
    if layout.world_size > 1:
        torch.distributed.barrier()
    before = whole(collection)
    try:
        checkpoint.load_checkpoint(collection, path)
        return "loaded"
    except CheckpointError as error:
        after = whole(collection)
        assert all(np.array_equal(before[key], after[key]) for key in before)
        return str(error)


def loss(collection: EmbeddingCollection, step: int) -> float:
    return float(loss_of(collection(share(step, collection.rank, collection.layout.world_size))))


def load_saved_in_blocks(rank: int, layout: RankLayout, path: str) -> bool:
    """Load a checkpoint whose tables were all saved in blocks, and return whether its values are there.

    It was saved by 3 ranks with seed 7 after 3 steps; the state of each row was set to its key.
    """
    checkpoint_windows(100)
    specs = [EmbeddingTable("item", 40, 4), EmbeddingTable("odd", 7, 3, dtype="float16")]
    expected, loaded = (
        EmbeddingCollection(specs, optimizer=RowWiseAdagrad(), layout=layout, seed=seed) for seed in (7, 8)
    )
    checkpoint.load_checkpoint(loaded, path)
    state = checkpoint.whole_state_dict(loaded)
    same = all(torch.equal(state[f"embeddings.{t.name}.weight"], expected.initial_table(t.name)) for t in specs)
    sums = [state[f"optimizer.rowwise_adagrad.{t.name}.sum"].view(-1) for t in specs]
    return same and torch.equal(torch.cat(sums), torch.arange(47.0)) and loaded.steps == 3


def saved_keys(rank: int, layout: RankLayout) -> list[str]:
    checkpoint_windows(2**20)
    return list(checkpoint.sharded_state_dict(make(layout, "adam", 1)))


def beyond_a_window(rank: int, layout: RankLayout, path: str) -> dict[str, bool]:
    """Read, save and load a table that is larger than a window."""
    collection = EmbeddingCollection([EmbeddingTable("item", 140_001, 64)], optimizer=SGD(0.1), layout=layout)
    expected = collection.initial_table("item")
    sharded = checkpoint.sharded_state_dict(collection)["embeddings.item.weight"]
    answers = {
        "beyond": expected.nbytes > blocks.MAX_WINDOW_BYTES,
        "sharded": isinstance(sharded, DTensor) and len(sharded.to_local()) < len(expected),
        "full": torch.equal(sharded.full_tensor(), expected),
        "whole": torch.equal(checkpoint.whole_state_dict(collection)["embeddings.item.weight"], expected),
    }
    checkpoint.save_checkpoint(collection, path)
    local = collection.state_dict()
    collection.load_rows("item", 0, torch.zeros_like(expected))
    answers["emptied"] = not collection.gather_table("item").any()
    checkpoint.load_checkpoint(collection, path)
    answers["loaded"] = torch.equal(collection.gather_table("item", device="cpu"), expected)
    collection.load_rows("item", 0, torch.zeros_like(expected))
    collection.load_state_dict(local)
    answers["local"] = torch.equal(collection.gather_table("item"), expected)
    return answers
