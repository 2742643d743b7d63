"""Rows in two memories: training, migrations, checkpoints and errors are those of rows that are all fast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from tests.support.exactness import Scenario, train_alone
from tests.support.rank_pool import RankPool
from tests.support.run_ahead_jobs import Loop

Ranks = Callable[[int], RankPool]
TABLES = [EmbeddingTable("item", 50, 4)]


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
    results = ranks(4).run("run_ahead_jobs:train", scenario, loop)
    losses, tables = train_alone(scenario)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["trained"], losses[rank], rtol=0, atol=1e-9)
        assert result["unequal"] == 0
        for name, table in tables.items():
            np.testing.assert_allclose(result["tables"][name], table, rtol=0, atol=1e-9)


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(EmbeddingError, match="slow_memory_dir without fast_memory_bytes"):
        EmbeddingCollection(TABLES, layout=RankLayout(1, 1), slow_memory_dir="somewhere")
    with pytest.raises(EmbeddingError, match="fast_memory_bytes=0 - give at least the bytes of a row"):
        EmbeddingCollection(TABLES, layout=RankLayout(1, 1), fast_memory_bytes=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_loads_and_resets_are_those_of_fast_rows(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    """Of rows that are rounded at random by their keys too."""
    for result in ranks(4).run("two_memories_jobs:both", RankLayout(2, 2), str(tmp_path / "saved"), dtype):
        assert result["frames"]
        assert all(frames < rows for frames, rows in result["frames"])
        assert result["after"] == [], "bit for bit"
        assert result["loaded"] == [[], []]
        assert not result["pretrained"]
        assert result["again"] == []
        assert not result["initial"]
        assert result["left"] == [], "files go with the collection"
        assert result["memory"][0] != result["memory"][1]


def test_pooled_tables_are_in_two_memories_too(ranks: Ranks) -> None:
    assert ranks(2).run("two_memories_jobs:bags", RankLayout(1, 2)) == [True, True]


def test_a_lost_file_is_an_error_on_every_rank_that_names_it() -> None:
    pool = RankPool(4)
    try:
        results = pool.run("two_memories_jobs:lose_the_file", RankLayout(2, 2), 2, timeout=60)
    finally:
        pool.close()
    for rank, (kind, text) in enumerate(results):
        assert kind == ("SlowMemoryError" if rank == 2 else "CollectiveError")
        assert "rank2.group" in text
        assert "was removed while in use" in text
