"""Rows in two memories: training, migrations, checkpoints and errors are those of rows that are all fast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.row_optimizers import SGD
from flexd.embedding.store.slow.file_rows import FileRows
from flexd.embedding.store.slow.log_rows import LogRows
from tests.support import run_ahead_jobs, two_memories_jobs
from tests.support.exactness import Scenario, train_alone
from tests.support.rank_pool import RankPool
from tests.support.run_ahead_jobs import Loop

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("more", "depth"),
    [
        ({"fast_memory_bytes": 1}, 0),
        ({"fast_memory_bytes": 1_500, "exchange": "direct_no_dedup"}, 0),
        ({"fast_memory_bytes": 1_500, "slow_file": True, "two_dims": True, "optimizer": "adam"}, 1),
        ({"fast_memory_bytes": 1_500, "exchange": "direct", "passes": 3, "replica_fraction": 1.0}, 0),
        ({"fast_memory_bytes": 1_500, "slow_file": True, "two_dims": True, "migrate_every": 2}, 3),
        ({"fast_memory_bytes": 1_500, "passes": 3, "replica_fraction": 0.3}, 4),
        ({"fast_memory_bytes": 3_000, "two_dims": True, "migrate_every": 2, "divide_every": 1}, 0),
        ({"fast_memory_bytes": 3_000, "two_dims": True, "slow_file": True, "divide_every": 2, "optimizer": "adam"}, 3),
    ],
)
def test_training_is_that_of_rows_that_are_all_fast(ranks: Ranks, more: dict[str, Any], depth: int) -> None:
    scenario = Scenario(nodes=2, local_ranks=2, steps=10, seed=5, **more)
    loop = Loop(ahead=depth > 0, evaluate_every=2, loops=1 + (depth > 1), depth=max(1, depth))
    results = ranks(4).run(run_ahead_jobs.train, scenario, loop)
    losses, tables = train_alone(scenario)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["trained"], losses[rank], rtol=0, atol=1e-9)
        assert result["unequal"] == 0
        for name, table in tables.items():
            np.testing.assert_allclose(result["tables"][name], table, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("more", "loop"),
    [
        ({"optimizer": "adam", "passes": 3}, Loop(ahead=False, max_norm=0.5, evaluate_every=2, read_every=3)),
        ({"comm_dtype": "float16", "slow_file": True}, Loop(depth=4, max_norm=0.5, save_every=3, evaluate_every=3)),
        ({"slow_file": True, "optimizer": "adagrad", "two_dims": True}, Loop(depth=2, loops=3, restarts=True)),
        ({"answered_by": ("sums", "rows"), "slow_file": True}, Loop(depth=3, loops=2, restarts=True, save_every=2)),
    ],
)
def test_float32_is_bit_equal_to_rows_that_are_all_fast(ranks: Ranks, more: dict[str, Any], loop: Loop) -> None:
    """Clipping, accumulation, a narrower wire, evaluation, reading, saves, loads, kills."""
    both = [
        ranks(2).run(
            run_ahead_jobs.train,
            Scenario(nodes=1, local_ranks=2, dtype="float32", seed=3, fast_memory_bytes=fast_memory_bytes, **more),
            loop,
        )
        for fast_memory_bytes in (1_500, None)
    ]
    for slow, fast in zip(*both, strict=True):
        assert slow["losses"] == fast["losses"]
        assert slow["errors"] == fast["errors"] == []
        for name, table in fast["tables"].items():
            np.testing.assert_array_equal(slow["tables"][name], table)


def test_slow_rows_are_a_log_where_its_index_fits_and_its_bytes_are_of_the_budget(tmp_path: Path) -> None:
    table = EmbeddingTable("item", 1_000, 32)
    for fast_memory_bytes, kind in ((4 * 5_000, LogRows), (4 * 5_000 - 1, FileRows)):
        collection = EmbeddingCollection(
            [table], optimizer=SGD(0.1), fast_memory_bytes=fast_memory_bytes, slow_memory_dir=tmp_path
        )
        tier = collection.engine.stores[0].tier
        assert tier is not None
        assert isinstance(tier.slow, kind)
        left = fast_memory_bytes - (5_000 if kind is LogRows else 0)
        assert tier.frames == left // (128 + 64)
        collection.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_loads_and_resets_are_those_of_fast_rows(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    """Of rows that are rounded at random by their keys too."""
    for result in ranks(4).run(two_memories_jobs.both, RankLayout(2, 2), str(tmp_path / "saved"), dtype):
        assert result["frames"]
        assert all(frames < rows for frames, rows in result["frames"])
        assert result["after"] == [], "bit for bit"
        assert result["loaded"] == [[], []]
        assert not result["pretrained"]
        assert result["again"] == []
        assert not result["initial"]
        assert result["left"] == [], "files go with the collection"
        assert result["memory"][0] != result["memory"][1]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("removed", "was removed while in use"), ("cut", "ends within the block"), ("full", "No space left on device"),
        ("slow", "blocks took more than"), ("damaged", "blocks are not what"),
    ],
)  # fmt: skip
def test_a_disk_that_fails_is_an_error_on_every_rank_that_names_the_file(fault: str, text: str) -> None:
    pool = RankPool(3)
    try:
        results = pool.run(two_memories_jobs.fail_the_disk, RankLayout(1, 3), 2, fault, timeout=60)
    finally:
        pool.close()
    for rank, (kind, said) in enumerate(results):
        assert kind == ("SlowMemoryError" if rank == 2 else "CollectiveError"), said
        assert "rank2.group" in said
        assert text in said
