"""Frames of a rank are divided anew by weights: within their bytes, and training goes on as with all rows fast."""

from __future__ import annotations

import math

import pytest
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.embedding.checkpoint import checkpoint
from flexd.embedding.store.slow.frame_division import divide_frames, divided, frame_bytes
from tests.support.checkpoint_jobs import as_numpy

TABLES = [
    flexd.EmbeddingTable("item", 300, 4), flexd.EmbeddingTable("shop", 200, 16), flexd.EmbeddingTable("tag", 5, 8)
]  # fmt: skip


def made(fast_memory_bytes: int | None) -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection(TABLES, optimizer=flexd.Adam(0.05), fast_memory_bytes=fast_memory_bytes, seed=3)


def step(collection: flexd.EmbeddingCollection, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    found = collection({
        table.name: flexd.Jagged(torch.randint(0, table.rows, (9,), generator=generator), torch.tensor([9]))
        for table in TABLES
    })  # fmt: skip
    loss = torch.stack([rows.values.square().sum() for rows in found.values()]).sum()  # type: ignore[union-attr]
    loss.backward()
    collection.optimizer.step()
    return float(loss.detach())


def test_rows_and_state_are_those_of_fast_rows_however_frames_are_divided() -> None:
    slow, fast = made(12_000), made(None)
    seen = set()
    for at, weights in enumerate([(1, 1, 1), (1, 0, 0), (0, 5, 1), (0, 0, 1), (1, 9, 1), (3, 1, 0)]):
        for seed in (2 * at, 2 * at + 1):
            assert step(slow, seed) == step(fast, seed)
        before = sum(store.tier.frames * frame_bytes(store) for store in slow.engine.stores if store.tier is not None)
        divide_frames(slow.engine.stores, weights)
        frames = [store.tier.frames for store in slow.engine.stores if store.tier is not None]
        seen.add(tuple(frames))
        assert (
            sum(n * frame_bytes(store) for n, store in zip(frames, slow.engine.stores, strict=True)) <= before + 3 * 260
        )
    assert len(seen) >= 4
    assert step(slow, 99) == step(fast, 99)
    for table in TABLES:
        assert torch.equal(slow.gather_table(table.name), fast.gather_table(table.name))
    mine, theirs = (as_numpy(checkpoint.whole_state_dict(each)) for each in (slow, fast))
    assert {key: value.tobytes() for key, value in mine.items()} == {k: v.tobytes() for k, v in theirs.items()}
    slow.close()
    fast.close()


def test_bytes_that_a_dim_group_has_no_rows_for_go_to_the_others() -> None:
    slow = made(12_000)
    stores = slow.engine.stores
    whole = sum(store.tier.frames * frame_bytes(store) for store in stores if store.tier is not None)
    frames = divided(stores, (1, 1, 8))
    assert frames[2] == 5
    left = whole - 5 * frame_bytes(stores[2])
    assert frames[0] == int(left / 2 / frame_bytes(stores[0]))
    assert frames[1] == int(left / 2 / frame_bytes(stores[1]))
    assert divided(stores, (0, 1, 0))[0] == 1, "one at least"
    assert sum(divided(stores, (0, 0, 0))) > 3
    slow.close()


def test_a_division_that_changes_hardly_anything_is_left() -> None:
    slow = made(12_000)
    stores = slow.engine.stores
    weights = [store.tier.frames * frame_bytes(store) for store in stores if store.tier is not None]
    before = [store.tier.rows.data_ptr() for store in stores if store.tier is not None]
    assert not divide_frames(stores, weights)
    assert [store.tier.rows.data_ptr() for store in stores if store.tier is not None] == before
    assert divide_frames(stores, (1, 3, 1))
    slow.close()


def test_rows_that_are_all_fast_stay() -> None:
    fast = made(None)
    assert divided(fast.engine.stores, (1, 0, 0)) == [300, 200, 5]
    assert not divide_frames(fast.engine.stores, (1, 0, 0))
    fast.close()


@pytest.mark.parametrize("weights", [(1, 1), (1, 1, -1), (1, math.nan, 1), (1, 1, math.inf)])
def test_weights_that_mean_nothing_are_refused(weights: tuple[float, ...]) -> None:
    slow = made(12_000)
    with pytest.raises(EmbeddingError, match="for 3 dim-groups"):
        divide_frames(slow.engine.stores, weights)
    slow.close()
