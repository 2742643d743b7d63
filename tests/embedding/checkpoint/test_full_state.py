"""Frameworks that call ``state_dict()`` on every rank and write rank 0's: noticed, and served by whole tables."""

import io
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from flexd.core.errors import EmbeddingError
from flexd.core.placement import Placement, RankLayout
from flexd.core.usage_warnings import USAGE_WARNINGS
from flexd.embedding.checkpoint import full_state, table_rows
from flexd.embedding.collection import EmbeddingCollection
from tests.support.collection_jobs import OPTIMIZERS, offer, random_placement, tables, train_steps, whole
from tests.support.rank_pool import Ranks, error_of

FOUR_RANKS = RankLayout(2, 2)


def make(layout: RankLayout, seed: int, **more: Any) -> EmbeddingCollection:
    table_rows.MAX_WINDOW_BYTES = 1_000
    return EmbeddingCollection(
        tables(), optimizer=OPTIMIZERS["adam"], layout=layout, average_gradients=False, replica_slots=[61, 23, 3],
        seed=seed, **more,
    )  # fmt: skip


def writes(rank: int, layout: RankLayout, path: str, way: str) -> dict[str, Any]:
    """Keep a ``state_dict`` as frameworks do, train on, and load what was kept."""
    USAGE_WARNINGS._noted.clear()  # of other jobs of the process
    collection = make(layout, 1)
    train_steps(collection, 0, 2)
    state, kept = collection.state_dict(), None
    file = Path(path) / ("0" if way == "rank 0" else str(rank))
    if way == "memory":
        kept = state
    elif way == "every rank" or rank == 0:
        torch.save(state, file)
    del state
    with mock.patch.object(logging.getLogger("flexd.embedding.checkpoint.local_state"), "warning") as warning:
        train_steps(collection, 2, 3)
    warned = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    before = whole(collection)
    given = kept or torch.load(file, weights_only=True)
    assert type(given["rank0.shard" if way == "rank 0" else f"rank{rank}.shard"].clone()) is torch.Tensor or kept
    text = error_of(collection.load_state_dict, given)
    after = whole(collection)
    changed = any(not np.array_equal(before[key], after[key]) for key in before)
    return {
        "warned": warned, "noted": [each.kind for each in USAGE_WARNINGS.reports()], "text": text, "changed": changed,
    }  # fmt: skip


def test_parts_that_were_dropped_are_noticed_at_the_save_and_named_on_every_rank_at_the_load(
    ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks(4).run(writes, FOUR_RANKS, str(tmp_path), "rank 0")
    for rank, result in enumerate(results):
        if rank == 0:
            assert result["warned"] == result["noted"] == []
            assert "rank 0 was given its part, rank 1 was given the part of rank 0 of 4" in result["text"]
        else:
            (warned,) = result["warned"]
            assert f"ranks [0] wrote what state_dict() returned there, and what it returned on rank {rank}" in warned
            assert result["noted"] == ["partial_state_dict"]
            assert f"saved by rank 0 of 4, loaded by rank {rank} of 4" in result["text"]
        assert all(way in result["text"] for way in ("full_state_dict=True", "flexd.CheckpointSeries"))
        assert not result["changed"], "nothing is loaded"


@pytest.mark.parametrize("way", ["every rank", "memory"])
def test_parts_that_were_kept_are_loaded_without_a_word(ranks: Ranks, tmp_path: Path, way: str) -> None:
    for result in ranks(4).run(writes, FOUR_RANKS, str(tmp_path), way):
        assert result["warned"] == result["noted"] == []
        assert (result["text"], result["changed"]) == ("", True)


def save_whole(rank: int, layout: RankLayout) -> tuple[bytes, dict[str, np.ndarray]]:
    collection = make(layout, 1, full_state_dict=True)
    offer(collection, Placement.empty().delta_to(random_placement(3, 40, layout)))
    train_steps(collection, 0, 3)
    state = collection.state_dict()
    assert rank == 0 or not state
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue(), whole(collection)


def load_whole(rank: int, layout: RankLayout, saved: bytes, more: dict[str, Any]) -> dict[str, np.ndarray]:
    collection = make(layout, 2, **more)
    offer(collection, Placement.empty().delta_to(random_placement(4, 40)))
    train_steps(collection, 0, 1)
    state = torch.load(io.BytesIO(saved), weights_only=True)
    assert str(collection.load_state_dict(state)) == "<All keys matched successfully>"
    assert collection.replicas_bit_equal() or layout.world_size == 1
    state["embeddings.odd.weight"] = state["embeddings.odd.weight"][:-1]
    loaded = whole(collection)
    assert "embeddings.odd.weight: shape (22, 3), the table has (23, 3)" in error_of(collection.load_state_dict, state)
    return loaded


def test_whole_tables_of_rank_0_are_loaded_by_any_number_of_ranks(ranks: Ranks) -> None:
    (saved, expected), *_ = ranks(4).run(save_whole, FOUR_RANKS)
    for layout, more in (
        (FOUR_RANKS, {"full_state_dict": True}), (RankLayout(3, 1), {"fast_memory_bytes": 2_000}),
        (RankLayout(1, 1), {}),
    ):  # fmt: skip
        for loaded in ranks(layout.world_size).run(load_whole, layout, saved, more):
            assert all(np.array_equal(loaded[key], value) for key, value in expected.items())


def test_whole_tables_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_state, "MAX_FULL_STATE_BYTES", 13_000)
    with pytest.raises(EmbeddingError, match=r"13,512 bytes, more than 13,000.*CheckpointSeries"):
        make(RankLayout(1, 1), 1, full_state_dict=True)
