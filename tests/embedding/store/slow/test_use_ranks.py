"""Misses by cache slots that a rank learns from its own uses, beside those of cache slot tables of these sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable
from flexd.embedding.store.slow.half_life import HalfLife

CPU = torch.device("cpu")


def drawn(rows: int, uses: int, exponent: float, steps: int, seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    share = np.arange(1, rows + 1) ** -exponent
    order = rng.permutation(rows)
    return [
        torch.from_numpy(np.unique(order[rng.choice(rows, uses, p=share / share.sum())])) for _ in range(steps)
    ]  # fmt: skip


def replayed(batches: list[torch.Tensor], rows: int, cache_slots: int, counted_from: int) -> float:
    """Return the misses of a step by a cache slot table."""
    table, half_life = CacheSlotTable(cache_slots, rows, CPU), HalfLife(cache_slots, rows, CPU)
    kept = torch.full((rows,), -math.inf, dtype=torch.float64)
    missed = 0
    for step, slots in enumerate(batches):
        arrivals = table.bring(slots)
        kept[arrivals.leaving.changed] = arrivals.leaving.counts
        come = arrivals.missing
        table.remember(arrivals.cache_slots[come], kept[slots[come]])
        table.use(arrivals.cache_slots, half_life.use(slots, 0))
        table.changed(arrivals.cache_slots)
        table.release(arrivals.cache_slots)
        missed += len(come) * (step >= counted_from)
    return missed / (len(batches) - counted_from)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
def test_the_curve_is_what_cache_slot_tables_of_these_sizes_miss(exponent: float) -> None:
    rows, steps = 4_000, 400
    batches = drawn(rows, 200, exponent, steps)
    half_life = HalfLife(800, rows, CPU)
    for step, slots in enumerate(batches):
        if step == steps // 2:
            half_life.ranks.curve(step, 0.0, 100)
        half_life.use(slots, 0)
    curve = half_life.ranks.curve(steps // 2, 0.5, 100)
    assert (np.diff(curve.saved) <= 0).all()
    assert curve.cache_slots.sum() == pytest.approx(rows)
    distinct = float(np.mean([len(slots) for slots in batches]))
    for cache_slots in (400, 800, 1_600):
        measured = replayed(batches, rows, cache_slots, steps // 2)
        assert curve.misses(cache_slots) == pytest.approx(measured, rel=0.2, abs=0.03 * distinct), cache_slots


def test_rows_that_appear_for_the_first_time_promise_nothing() -> None:
    half_life = HalfLife(100, 10_000, CPU)
    for step in range(50):
        half_life.use(torch.arange(100) + 100 * step, 0)
    curve = half_life.ranks.curve(50, 0.5, 100)
    # A cache slot for each row of a step is used again by the update alone.
    assert curve.misses(100) - curve.misses(5_000) < 0.02 * curve.misses(100)
    assert curve.cold == pytest.approx(100, rel=0.05)
