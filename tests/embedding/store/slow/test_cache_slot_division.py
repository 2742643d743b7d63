"""Cache slots of a rank follow the misses of its dim-groups as it trains, and training goes on as with all rows
fast."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flexd
from flexd.embedding.store.slow import cache_slot_division
from flexd.embedding.store.slow.cache_slot_division import CacheSlotDivision, cache_slot_bytes
from flexd.embedding.store.slow.tiered_rows import MISSED
from tests.support.collection_jobs import whole

TABLES = [
    flexd.EmbeddingTable("item", 300, 4), flexd.EmbeddingTable("shop", 200, 16), flexd.EmbeddingTable("tag", 5, 8)
]  # fmt: skip


def made(fast_memory_bytes: int | None) -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection(TABLES, optimizer=flexd.Adam(0.05), fast_memory_bytes=fast_memory_bytes, seed=3)


def step(collection: flexd.EmbeddingCollection, seed: int, hot: str = "") -> float:
    """Train on 9 rows of each table, of ``hot`` on 40."""
    generator = torch.Generator().manual_seed(seed)
    found = collection({
        table.name: flexd.Jagged(torch.randint(0, table.rows, (count,), generator=generator), torch.tensor([count]))
        for table in TABLES
        for count in [40 if table.name == hot else 9]
    })  # fmt: skip
    loss = torch.stack([rows.values.square().sum() for rows in found.values()]).sum()  # type: ignore[union-attr]
    loss.backward()
    collection.optimizer.step()
    return float(loss.detach())


def cache_slots_of(collection: flexd.EmbeddingCollection) -> list[int]:
    return [store.tier.cache_slots for store in collection.engine.stores if store.tier is not None]


def divisions(collection: flexd.EmbeddingCollection) -> list[CacheSlotDivision]:
    return [each for each in collection.engine.joined if isinstance(each, CacheSlotDivision)]


def used_bytes(collection: flexd.EmbeddingCollection) -> int:
    sizes = [cache_slot_bytes(store) for store in collection.engine.stores]
    return int(np.dot(cache_slots_of(collection), sizes))


def test_cache_slots_follow_the_use_and_rows_are_those_of_fast_rows() -> None:
    slow, fast = made(12_000), made(None)
    by_rows, budget = cache_slots_of(slow), used_bytes(slow)
    (division,) = divisions(slow)
    seen = []
    for hot in ("item", "shop"):
        for seed in range(100):
            assert step(slow, seed, hot) == step(fast, seed, hot)
        seen.append(cache_slots_of(slow))
        assert used_bytes(slow) <= budget + 3 * max(map(cache_slot_bytes, slow.engine.stores))
    assert seen[0][0] > 1.2 * by_rows[0], "cache slots for the table that is used"
    assert seen[1][1] > 1.2 * seen[0][1], "and, after its use has moved, for the other one"
    assert 2 <= division.changes <= 200 // cache_slot_division.LEAST_STEPS
    mine, theirs = (whole(each) for each in (slow, fast))
    assert {key: value.tobytes() for key, value in mine.items()} == {k: v.tobytes() for k, v in theirs.items()}
    slow.close()
    fast.close()


def test_a_division_misses_less_than_cache_slots_by_rows() -> None:
    missed = []
    for divides in (False, True):
        slow = made(12_000)
        if not divides:
            slow.engine.joined.remove(*divisions(slow))
        for seed in range(60):
            step(slow, seed, "item")
        tiers = [store.tier for store in slow.engine.stores if store.tier is not None]
        before = sum(int(tier.counts.by_table()[:, MISSED].sum()) for tier in tiers)
        for seed in range(60, 120):
            step(slow, seed, "item")
        missed.append(sum(int(tier.counts.by_table()[:, MISSED].sum()) for tier in tiers) - before)
        slow.close()
    assert missed[1] < 0.9 * missed[0]


def test_cache_slots_that_there_is_no_memory_to_copy_stay_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = made(12_000), made(None)
    for seed in range(5):
        assert step(slow, seed) == step(fast, seed)
    (division,), before = divisions(slow), cache_slots_of(slow)
    changes = division.changes

    def full(*shape: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_zeros", full)
        assert not division.change([1, 1, 1])
    assert cache_slots_of(slow) == before
    assert division.changes == changes
    for seed in range(5, 9):
        assert step(slow, seed) == step(fast, seed)
    slow.close()
    fast.close()
