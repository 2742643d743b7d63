"""Checkpoints loaded into collections whose tables have changed: new, enlarged, gone, or listed in another order."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import flexd
from flexd.core.placement import Placement, RankLayout
from flexd.embedding.checkpoint import table_rows
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from tests.support.collection_jobs import OPTIMIZERS, loss_of, offer, random_placement, whole
from tests.support.rank_pool import Ranks, error_of

SAVED = {"item": (61, 8), "odd": (23, 3), "tiny": (3, 2)}
CHANGED = {"lone": (7, 5), "odd": (23, 3), "more": (19, 3), "item": (90, 8)}
"""``lone`` is a dim-group of its own, as ``tiny`` was, ``more`` is one of an old group, and ``item`` has grown."""
FOUR_RANKS = RankLayout(2, 2)


def make(
    layout: RankLayout, tables: dict[str, tuple[int, int]], seed: int, fast_memory_bytes: int | None = None
) -> EmbeddingCollection:
    # ``item`` is a DTensor of blocks, the others are of one rank.
    table_rows.MAX_WINDOW_BYTES = 2_000
    listed = [EmbeddingTable(name, rows, dim, dtype="float64") for name, (rows, dim) in tables.items()]
    return EmbeddingCollection(
        listed, optimizer=OPTIMIZERS["adam"], layout=layout, replica_slots=[20] * len({t.dim for t in listed}),
        average_gradients=False, seed=seed, fast_memory_bytes=fast_memory_bytes,
    )  # fmt: skip


def train(collection: EmbeddingCollection, steps: int) -> None:
    for step in range(steps):
        rng = np.random.default_rng(step)
        ids = {table.name: torch.from_numpy(rng.integers(0, table.rows, 12)) for table in collection.tables}
        mine = {name: of_table[collection.rank :: collection.layout.world_size] for name, of_table in ids.items()}
        features = {name: flexd.Jagged(of_table, torch.tensor([len(of_table)])) for name, of_table in mine.items()}
        loss_of(collection(features)).backward()
        collection.optimizer.step()


def save(rank: int, layout: RankLayout, path: str) -> dict[str, np.ndarray]:
    """Save a series of two, of which the second builds on the first, and the same for torch."""
    collection = make(layout, SAVED, 1)
    offer(collection, Placement.empty().delta_to(random_placement(1, 30)))
    series = flexd.CheckpointSeries(collection, f"{path}/series")
    train(collection, 2)
    series.save()
    train(collection, 1)
    assert series.save().base == 1
    dcp.save({"tables": flexd.ShardedState(collection)}, checkpoint_id=f"{path}/dcp")
    series.close()
    return whole(collection)


def load(
    rank: int, layout: RankLayout, path: str, kind: str, trained: int, fast_memory_bytes: int | None
) -> dict[str, Any]:
    collection = make(layout, CHANGED, 3, fast_memory_bytes)
    train(collection, trained)
    series = flexd.CheckpointSeries(collection, f"{path}/series")
    module = "flexd.embedding.checkpoint." + ("series" if kind == "series" else "changed_tables")
    with mock.patch(f"{module}.logger") as logger:
        if kind == "series":
            before = whole(collection), collection.steps
            texts = [error_of(series.load), error_of(series.load, changed_tables="ini")]
            after = whole(collection), collection.steps
            assert all(np.array_equal(before[0][key], after[0][key]) for key in before[0])
            assert before[1] == after[1]
            series.load(changed_tables="init")
        else:
            tables = flexd.ShardedState(collection)
            texts = [refused_by_torch(tables, f"{path}/dcp", None)]
            dcp.load({"tables": tables}, checkpoint_id=f"{path}/dcp", planner=flexd.ChangedTables())
        warnings = [call.args[0] % call.args[1:] for call in logger.warning.call_args_list]
    loaded, equal = whole(collection), collection.replicas_bit_equal()
    following = None
    if kind == "series":
        train(collection, 1)
        following = series.save().base, whole(collection)
        series.load()
        assert all(np.array_equal(following[1][key], value) for key, value in whole(collection).items())
    initial = {name: collection.initial_table(name).view(torch.uint8).numpy() for name in CHANGED}
    series.close()
    return {
        "loaded": loaded, "initial": initial, "steps": collection.steps, "equal": equal, "texts": texts,
        "warnings": warnings, "following": following and following[0],
    }  # fmt: skip


def refused_by_torch(tables: flexd.ShardedState, path: str, planner: flexd.ChangedTables | None) -> str:
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"tables": tables}, checkpoint_id=path, planner=planner)
    return str(caught.value)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("changed")
    return path, ranks(4).run(save, FOUR_RANKS, str(path))[0]


@pytest.mark.parametrize("kind", ["series", "dcp"])
@pytest.mark.parametrize(
    ("layout", "trained", "fast_memory_bytes"),
    [(RankLayout(1, 2), 0, None), (RankLayout(3, 1), 2, 2_000), (RankLayout(2, 2), 1, None)],
)
def test_new_rows_begin_from_their_seed_and_the_others_are_loaded(
    ranks: Ranks, saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, kind: str, layout: RankLayout,
    trained: int, fast_memory_bytes: int | None,
) -> None:  # fmt: skip
    path, before = saved
    (tmp_path / "dcp").symlink_to(path / "dcp")
    (tmp_path / "series").mkdir()
    for each in (path / "series").iterdir():
        (tmp_path / "series" / each.name).symlink_to(each)
    results = ranks(layout.world_size).run(load, layout, str(tmp_path), kind, trained, fast_memory_bytes)
    for rank, result in enumerate(results):
        for name, (rows, _) in CHANGED.items():
            had = SAVED.get(name, (0, 0))[0]
            weights = result["loaded"][f"embeddings.{name}.weight"]
            np.testing.assert_array_equal(weights[had:], result["initial"][name][had:], err_msg=name)
            assert len(weights) == rows
            for key in (f"embeddings.{name}.weight", *(f"optimizer.adam.{name}.exp_avg{sq}" for sq in ("", "_sq"))):
                if had:
                    np.testing.assert_array_equal(result["loaded"][key][:had], before[key], err_msg=key)
                assert not key.startswith("optimizer") or not result["loaded"][key][had:].any()
        assert result["steps"] == (3 if kind == "dcp" else 4)
        assert result["equal"]
        assert all(result["texts"])
        warning = " ".join(result["warnings"])
        assert all(name in warning for name in (("lone", "more", "item", "tiny") if rank == 0 else ()))
        assert "odd" not in warning
    if kind == "series":
        text, of_option = results[0]["texts"]
        for each in (
            "'lone' is missing",
            "'more' is",
            "'tiny' is unknown",
            "'item' is 61 x 8",
            'changed_tables="init"',
        ):
            assert each in text
        assert "changed_tables='ini', which is not 'init' or 'error'" in of_option
        assert results[0]["following"] is None, "the checkpoint after it has all rows"


def shrunk(rank: int, layout: RankLayout, path: str) -> list[str]:
    collection = make(layout, {**SAVED, "item": (60, 8)}, 3)
    series = flexd.CheckpointSeries(collection, f"{path}/series")
    texts = [
        error_of(series.load, changed_tables="init"),
        refused_by_torch(flexd.ShardedState(collection), f"{path}/dcp", flexd.ChangedTables()),
    ]
    series.close()
    other = make(layout, {"other": (5, 2)}, 3)
    series = flexd.CheckpointSeries(other, f"{path}/series")
    texts.append(error_of(series.load, changed_tables="init"))
    series.close()
    return texts


def test_rows_that_do_not_fit_are_refused(ranks: Ranks, saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    of_series, of_torch, of_others = ranks(2).run(shrunk, RankLayout(2, 1), str(saved[0]))[0]
    assert "table 'item' is 61 x 8 float64 with adam in the checkpoint and 60 x 8" in of_series
    assert "init" not in of_series
    assert "Size mismatch between saved torch.Size([61, 8]) and current: torch.Size([60, 8])" in of_torch
    assert "no table of the checkpoint is in the collection" in of_others


def test_a_series_goes_on_with_tables_in_another_order(tmp_path: Path) -> None:
    """Each checkpoint of a chain is read by the order of its own tables."""
    for order in (list(SAVED), ["tiny", "odd", "item"]):
        collection = make(RankLayout(1, 1), {name: SAVED[name] for name in order}, 1)
        series = flexd.CheckpointSeries(collection, tmp_path)
        if series.numbers():
            series.load()
        for _ in range(2):
            train(collection, 1)
            newest = series.save()
        series.close()
    assert newest.base == 3
    loaded = make(RankLayout(1, 1), SAVED, 2)
    flexd.CheckpointSeries(loaded, tmp_path).load()
    expected = whole(collection)
    assert all(np.array_equal(value, expected[key]) for key, value in whole(loaded).items())
