"""Checkpoints on real gloo ranks: saved by some ranks, loaded by others, and refused if they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.collection import EmbeddingTable
from tests.support import checkpoint_jobs
from tests.support.collection_jobs import ROWS, tables
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


TOTAL = sum(ROWS.values())


FOUR_RANKS, ONE_RANK = RankLayout(2, 2), RankLayout(1, 1)


def replicate(seed: int) -> Delta:
    rng = np.random.default_rng(seed)
    keys = np.sort(rng.permutation(TOTAL)[:40]).astype(np.int64)
    return Delta(keys, np.zeros(40, np.uint8), rng.integers(1, 3, 40).astype(np.uint8))


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Save a checkpoint of 2 x 2 ranks with Adam; return its path and the result of further training."""
    path = tmp_path_factory.mktemp("checkpoint") / "adam"
    results = ranks(4).run(checkpoint_jobs.save, FOUR_RANKS, "adam", str(path), replicate(1), 300)
    return path, results[0]


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
    results = ranks(layout.world_size).run(checkpoint_jobs.load, layout, "adam", str(saved[0]), replicate(2), 100)
    check_loaded(results, saved[1])
    if layout.world_size > 1:
        assert all(result["version"] == 1 and result["replicas"] > 10 for result in results)


@pytest.mark.parametrize(("optimizer", "dtype"), [("rowwise_adagrad", "float32"), ("sgd", "bfloat16")])
def test_checkpoints_of_other_optimizers_and_dtypes(ranks: Ranks, tmp_path: Path, optimizer: str, dtype: str) -> None:
    path, three, two = str(tmp_path / "there"), RankLayout(3, 1), RankLayout(2, 1)
    expected = ranks(3).run(checkpoint_jobs.save, three, optimizer, path, replicate(3), 2**20, dtype)
    results = ranks(2).run(checkpoint_jobs.load, two, optimizer, path, replicate(4), 2**20, dtype)
    check_loaded(results, expected[0], tolerance={"float32": 1e-4, "bfloat16": 0.5}[dtype])


def test_a_model_and_a_collection_share_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ranks(4).run(checkpoint_jobs.beside_a_model, FOUR_RANKS, str(tmp_path / "there")))


ITEM, ODD, TINY = tables()


@pytest.mark.parametrize(
    ("specs", "optimizer", "causes"),
    [
        ([ITEM, ODD], "adam", ["embeddings.tiny.weight is unknown to the collection"]),
        (
            [ITEM, ODD, TINY, EmbeddingTable("new", 5, 2)], "adam",
            ["embeddings.new.weight is missing", "optimizer.adam.new.exp_avg is missing"],
        ),
        (
            [EmbeddingTable("item", 61, 4, dtype="float64"), ODD, TINY], "adam",
            ["embeddings.item.weight is 61 x 8 float64 in the checkpoint and 61 x 4 float64 in the collection"],
        ),
        (
            [EmbeddingTable("item", 62, 8, dtype="float64"), ODD, TINY], "adam",
            ["embeddings.item.weight is 61 x 8 float64 in the checkpoint and 62 x 8 float64 in the collection"],
        ),
        (
            [EmbeddingTable("item", 61, 8), ODD, TINY], "adam",
            ["embeddings.item.weight is 61 x 8 float64 in the checkpoint and 61 x 8 float32 in the collection"],
        ),
        (
            [ITEM, ODD, TINY], "rowwise_adagrad",
            ["optimizer.rowwise_adagrad.item.sum is missing", "and 6 more"],
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_of_other_tables_names_the_difference(
    ranks: Ranks, saved: tuple[Path, dict], specs: list[EmbeddingTable], optimizer: str, causes: list[str]
) -> None:
    for text, unchanged in ranks(2).run(
        checkpoint_jobs.load_into, RankLayout(1, 2), str(saved[0]), specs, optimizer, timeout=60
    ):
        for cause in causes:
            assert cause in text
        assert unchanged


@pytest.mark.parametrize("change", ["one bit", "two rows", "a table"])
def test_a_changed_state_is_refused(ranks: Ranks, change: str) -> None:
    results = ranks(4).run(checkpoint_jobs.load_changed, FOUR_RANKS, change, timeout=60)
    for rank, (text, unchanged) in enumerate(results):
        if change == "a table":
            cause = "rank 3: embeddings.odd.weight is missing"
            assert (cause if rank == 3 else "see the error of rank 3") in text
        else:
            assert "tables item differ from the saved ones" in text
        assert unchanged


@pytest.mark.parametrize("layout", [FOUR_RANKS, ONE_RANK])
def test_whole_tables_round_trip_through_plain_modules(ranks: Ranks, layout: RankLayout) -> None:
    for result in ranks(layout.world_size).run(checkpoint_jobs.plain_tables, layout):
        assert result["same"]
        assert result["weights"]
        assert not result["state"], "weights without state start with initial optimizer state"
        assert result["steps"] == 0
        assert "optimizer.adam.odd.exp_avg is missing" in result["text"]


def test_one_rank_saves_a_table_that_fits_a_window(ranks: Ranks) -> None:
    """The size of a checkpoint's metadata grows with the tables, not with tables times ranks."""
    by_rank = ranks(4).run(checkpoint_jobs.saved_keys, FOUR_RANKS)
    keys = [key for keys in by_rank for key in keys if key != "optimizer.adam.step"]
    assert len(keys) == len(set(keys)) == 4 * len(ROWS)
