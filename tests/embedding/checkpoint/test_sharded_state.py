"""Checkpoints on real gloo ranks: saved by some ranks, loaded by others, and refused if they do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import flexd
from flexd.core.placement import Delta, RankLayout
from flexd.embedding.checkpoint import table_rows
from flexd.embedding.checkpoint.sharded_state import ShardedState
from flexd.embedding.collection import EmbeddingCollection
from tests.support.collection_jobs import OPTIMIZERS, ROWS, offer, pair, tables, train_steps, whole
from tests.support.rank_pool import Ranks, error_of


def make(layout: RankLayout, optimizer: str, seed: int, dtype: str = "float64") -> EmbeddingCollection:
    return EmbeddingCollection(
        tables(dtype), optimizer=OPTIMIZERS[optimizer], layout=layout, replica_slots=[61, 23, 3],
        average_gradients=False, seed=seed,
    )  # fmt: skip


def save(
    rank: int, layout: RankLayout, optimizer: str, path: str, delta: Delta, window_bytes: int, dtype: str = "float64"
) -> dict[str, Any]:
    table_rows.MAX_WINDOW_BYTES = window_bytes
    collection = make(layout, optimizer, 1, dtype)
    offer(collection, delta)
    train_steps(collection, 0, 4)
    dcp.save({"tables": ShardedState(collection)}, checkpoint_id=path)
    saved = whole(collection)
    train_steps(collection, 4, 4)
    return {"saved": saved, "end": tables_of(collection), "steps": collection.steps}


def save_beside_training(
    rank: int, layout: RankLayout, optimizer: str, path: str, delta: Delta, window_bytes: int
) -> dict[str, Any]:
    """Save as ``save`` while the training goes on, on a process group that nothing else uses."""
    table_rows.MAX_WINDOW_BYTES = window_bytes
    collection = make(layout, optimizer, 1)
    offer(collection, delta)
    train_steps(collection, 0, 4)
    saved = whole(collection)
    saving = dcp.async_save(
        {"tables": ShardedState(collection)}, checkpoint_id=path, process_group=dist.new_group(backend="gloo")
    )
    train_steps(collection, 4, 4)
    saving.result(60)
    return {"saved": saved, "end": tables_of(collection), "steps": collection.steps}


def load(
    rank: int, layout: RankLayout, optimizer: str, path: str, delta: Delta, window_bytes: int, dtype: str = "float64"
) -> dict[str, Any]:
    """Load over other values, steps and replicas, and continue training like ``save``."""
    table_rows.MAX_WINDOW_BYTES = window_bytes
    collection = make(layout, optimizer, 2, dtype)
    offer(collection, delta)
    train_steps(collection, 100, 3)
    dcp.load({"tables": ShardedState(collection)}, checkpoint_id=path)
    loaded, version = whole(collection), collection.placement_version
    equal = train_steps(collection, 4, 4)
    return {
        "loaded": loaded, "end": tables_of(collection), "steps": collection.steps, "equal": equal, "version": version,
        "replicas": sum(len(store.directory) for store in collection.engine.stores),
    }  # fmt: skip


def tables_of(collection: EmbeddingCollection) -> dict[str, np.ndarray]:
    return {name: collection.gather_table(name).double().numpy() for name in ROWS}


def load_changed(rank: int, layout: RankLayout, change: str) -> tuple[str, bool]:
    table_rows.MAX_WINDOW_BYTES = 300
    collection = make(layout, "adam", 1)
    train_steps(collection, 0, 2)
    state = ShardedState(collection).state_dict()
    before = whole(collection)
    if rank == layout.world_size - 1:
        if change == "one bit":
            state["optimizer.adam.item.exp_avg"].to_local().view(torch.uint8)[1, 3] ^= 4
        elif change == "two rows":
            rows = state["embeddings.item.weight"].to_local()
            rows[:2] = rows[[1, 0]]
        elif change == "a table":
            del state["embeddings.odd.weight"]
    text = error_of(ShardedState(collection).load_state_dict, state)
    after = whole(collection)
    return text, all(np.array_equal(before[key], after[key]) for key in before)


def saved_keys(rank: int, layout: RankLayout) -> list[str]:
    table_rows.MAX_WINDOW_BYTES = 2**20
    return list(ShardedState(make(layout, "adam", 1)).state_dict())


FOUR_RANKS, ONE_RANK = RankLayout(2, 2), RankLayout(1, 1)


def replicate(seed: int) -> Delta:
    rng = np.random.default_rng(seed)
    keys = np.sort(rng.permutation(sum(ROWS.values()))[:40]).astype(np.int64)
    return Delta(keys, np.zeros(40, np.uint8), rng.integers(1, 3, 40).astype(np.uint8))


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Save a checkpoint of 2 x 2 ranks with Adam; return its path and the result of further training."""
    path = tmp_path_factory.mktemp("checkpoint") / "adam"
    return path, ranks(4).run(save, FOUR_RANKS, "adam", str(path), replicate(1), 300)[0]


def check_loaded(results: list[dict], saved: dict, tolerance: float = 1e-9) -> None:
    for result in results:
        assert set(result["loaded"]) == set(saved["saved"])
        for key, expected in saved["saved"].items():
            np.testing.assert_array_equal(result["loaded"][key], expected, err_msg=key)
        assert result["steps"] == saved["steps"] == 8
        assert result["equal"], "a replica differed from its home copy"
        for name, table in saved["end"].items():
            np.testing.assert_allclose(result["end"][name], table, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("nodes", "local_ranks"), [(1, 2), (3, 1), (1, 1), (2, 2), (1, 4)])
def test_any_number_of_ranks_continues_from_a_checkpoint(
    ranks: Ranks, saved: tuple[Path, dict], nodes: int, local_ranks: int
) -> None:
    layout = RankLayout(nodes, local_ranks)
    results = ranks(layout.world_size).run(load, layout, "adam", str(saved[0]), replicate(2), 100)
    check_loaded(results, saved[1])
    if layout.world_size > 1:
        assert all(result["version"] == 1 and result["replicas"] > 10 for result in results)


@pytest.mark.parametrize(("optimizer", "dtype"), [("rowwise_adagrad", "float32"), ("sgd", "bfloat16")])
def test_checkpoints_of_other_optimizers_and_dtypes(ranks: Ranks, tmp_path: Path, optimizer: str, dtype: str) -> None:
    path, three, two = str(tmp_path / "there"), RankLayout(3, 1), RankLayout(2, 1)
    expected = ranks(3).run(save, three, optimizer, path, replicate(3), 2**20, dtype)
    results = ranks(2).run(load, two, optimizer, path, replicate(4), 2**20, dtype)
    check_loaded(results, expected[0], tolerance={"float32": 1e-4, "bfloat16": 0.5}[dtype])


def test_a_checkpoint_saved_beside_training_has_the_rows_of_its_call(ranks: Ranks, tmp_path: Path) -> None:
    path, two = str(tmp_path / "beside"), RankLayout(2, 1)
    expected = ranks(2).run(save_beside_training, two, "adam", path, replicate(5), 300)
    check_loaded(ranks(2).run(load, two, "adam", path, replicate(6), 100), expected[0])


@pytest.mark.parametrize("change", ["one bit", "two rows", "a table"])
def test_a_changed_state_is_refused(ranks: Ranks, change: str) -> None:
    for rank, (text, unchanged) in enumerate(ranks(4).run(load_changed, FOUR_RANKS, change, timeout=60)):
        if change == "a table":
            assert ("rank 3: embeddings.odd.weight is missing" if rank == 3 else "see the error of rank 3") in text
        else:
            assert "tables item differ from the saved ones" in text
        assert unchanged


def test_one_rank_saves_a_table_that_fits_a_window(ranks: Ranks) -> None:
    """The size of a checkpoint's metadata grows with the tables, not with tables times ranks."""
    keys = [key for keys in ranks(4).run(saved_keys, FOUR_RANKS) for key in keys if key != "optimizer.adam.step"]
    assert len(keys) == len(set(keys)) == 4 * len(ROWS)


def test_unequal_state_dicts_are_refused() -> None:
    collection, _ = pair()
    saved = collection.state_dict()
    other = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 20, 4, dtype="float64"), flexd.EmbeddingTable("b", 3, 2)]
    )
    with pytest.raises(RuntimeError, match="with other tables"):
        other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="saved by rank 1 of 4, loaded by rank 0 of 1"):
        collection.load_state_dict({**saved, "rank0.shard": torch.tensor([1, 4, int(saved["rank0.shard"][2]), 0])})
    with pytest.raises(RuntimeError, match=r"rank0\.group0\.rows: shape \(3, 4\)"):
        collection.load_state_dict({**saved, "rank0.group0.rows": torch.zeros(3, 4)})
    of_another = {key.replace("rank0", "rank2"): value for key, value in saved.items()}
    of_another["rank2.shard"] = torch.tensor([2, 3, *saved["rank0.shard"][2:].tolist()])
    with pytest.raises(RuntimeError, match="saved by rank 2 of 3, loaded by rank 0 of 1"):
        collection.load_state_dict(of_another)
    for key in saved:
        with pytest.raises(RuntimeError, match=f"Missing key.*{key}"):
            collection.load_state_dict({name: value for name, value in saved.items() if name != key})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*rank0\.group1\.rows"):
        collection.load_state_dict({**saved, "rank0.group1.rows": torch.zeros(1)})
    collection.load_state_dict({"rank0.group0.rows": saved["rank0.group0.rows"] + 1}, strict=False)
    assert torch.equal(collection.gather_table("item"), saved["rank0.group0.rows"] + 1)
