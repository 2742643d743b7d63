"""The half-life of counts follows how fast popularity moves, by a sample of the rows within a few bytes a cache
slot."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable, LookAhead
from flexd.embedding.store.slow.half_life import FIRST, HalfLife

ROWS, CACHE_SLOTS, BATCH = 40_000, 4_000, 1_500
CPU = torch.device("cpu")


def trained(half_life: HalfLife, steps: int, moved_every: int | None) -> list[int]:
    """Choices of steps that draw by Zipf's law, whose popular rows are others every so many steps."""
    generator, weights = np.random.default_rng(3), 1.0 / np.arange(1, ROWS + 1)
    cumulative, order, choices = np.cumsum(weights / weights.sum()), generator.permutation(ROWS), []
    for step in range(steps):
        if moved_every and step % moved_every == 0:
            order = generator.permutation(ROWS)
        drawn = order[np.searchsorted(cumulative, generator.random(BATCH)).clip(max=ROWS - 1)]
        half_life.use(torch.from_numpy(np.unique(drawn)), 0)
        choices.append(half_life.chosen)
    return choices


def test_counts_remember_long_while_popularity_stays_and_short_while_it_moves() -> None:
    stays = trained(HalfLife(CACHE_SLOTS, ROWS, CPU), 300, None)
    moves = trained(HalfLife(CACHE_SLOTS, ROWS, CPU), 300, 12)
    assert np.mean(stays[100:]) >= FIRST
    assert np.mean(moves[100:]) < FIRST - 0.5


@pytest.mark.parametrize(("cache_slots", "rows"), [(1, 3), (7, 7), (100, 10**6), (5_000, 6_000), (10**6, 10**7)])
def test_a_sample_has_one_row_of_each_block_and_takes_few_bytes_a_cache_slot(cache_slots: int, rows: int) -> None:
    half_life = HalfLife(cache_slots, rows, CPU)
    assert half_life.nbytes <= 5 * cache_slots + 6_000, "a sample of 256 rows at least"
    half_life.use(torch.arange(min(rows, 50_000)), 0)
    seen = int((half_life._last > 0).sum())
    whole = min(rows, 50_000) // half_life._stride
    assert whole <= seen <= whole + 1


def test_rows_that_batches_ahead_keep_are_no_misses() -> None:
    near, far = HalfLife(1_000, 10_000, CPU), HalfLife(1_000, 10_000, CPU)
    for step in range(40):  # each row again after three steps
        mine = torch.arange(10_000)[step % 3 :: 3]
        near.use(mine, 3)
        far.use(mine, 0)
    assert float(near._missed.sum()) < 0.1 * float(far._missed.sum())


def drawn(rows: int, uses: int, exponent: float, steps: int, seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    share = np.arange(1, rows + 1) ** -exponent
    order = rng.permutation(rows)
    return [
        torch.from_numpy(np.unique(order[rng.choice(rows, uses, p=share / share.sum())])) for _ in range(steps)
    ]  # fmt: skip


def replayed(batches: list[torch.Tensor], rows: int, cache_slots: int, counted_from: int, known: int = 0) -> float:
    """Return the misses of a step by a cache slot table, with some batches known after the present one."""
    table, half_life = CacheSlotTable(cache_slots, rows, CPU), HalfLife(cache_slots, rows, CPU)
    ahead, following = LookAhead(table), iter(batches)
    for slots in itertools.islice(following, known):
        ahead.add(slots)
    kept = torch.full((rows,), -math.inf, dtype=torch.float64)
    missed = 0
    for step, slots in enumerate(batches):
        if known:
            ahead.add(next(following, slots[:0]))
            ahead.begin(0)
        arrivals = table.bring(slots)
        kept[arrivals.leaving.changed] = arrivals.leaving.counts
        come = arrivals.missing
        table.remember(arrivals.cache_slots[come], kept[slots[come]])
        table.use(arrivals.cache_slots, half_life.use(slots, known), ahead=ahead.use_of(slots))
        table.changed(arrivals.cache_slots)
        table.release(arrivals.cache_slots)
        missed += len(come) * (step >= counted_from)
    return missed / (len(batches) - counted_from)


def searched(batches: list[torch.Tensor], cache_slots: int, counted_from: int, *, belady: bool) -> float:
    """Return the misses of a step where of rows that the batch does not use those leave whose next use is farthest, or
    those that were used least recently."""
    uses: list[dict[int, int]] = []
    following: dict[int, int] = {}
    for step, slots in reversed(list(enumerate(batches))):
        rows = slots.tolist()
        uses.insert(0, {row: following.get(row, len(batches)) if belady else -step for row in rows})
        following |= dict.fromkeys(rows, step)
    held: dict[int, int] = {}
    missed = 0
    for step, use in enumerate(uses):
        come = len(use.keys() - held.keys())
        missed += come * (step >= counted_from)
        others = sorted(held.keys() - use.keys(), key=held.__getitem__, reverse=True)
        for row in others[: max(0, len(held) + come - cache_slots)]:
            del held[row]
        held |= use
    return missed / (len(batches) - counted_from)


def test_counts_miss_less_than_last_uses_and_four_known_batches_nearly_as_little_as_all() -> None:
    rows, steps = 4_000, 200
    batches = drawn(rows, 256, 1.05, steps, seed=2)
    given = (rows // 20, steps // 4)
    assert replayed(batches, rows, *given) < searched(batches, *given, belady=False)
    assert replayed(batches, rows, *given, known=4) <= 1.25 * searched(batches, *given, belady=True)


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
