"""Division of fast memory: within its budget, and as good as trying everything; half-lives."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexd
from flexd.embedding.store.slow import tiered_storage
from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable, LookAhead
from flexd.embedding.store.slow.fast_memory import (
    CACHE_SLOT_BYTES,
    FIRST,
    CacheSlotCurve,
    HalfLife,
    divide_cache_slots,
    total_misses,
)
from flexd.embedding.store.slow.tiered_storage import CacheSlotDivision
from tests.support.collection_jobs import whole

saved_lists = st.lists(st.floats(0.001, 2.0), min_size=1, max_size=6)


def curve(saved: list[float], *, more_rows: int = 0, cache_slot_bytes: int = 100, cold: float = 0.0) -> CacheSlotCurve:
    """One cache slot each, and some that save nothing."""
    ordered = np.sort(np.array(saved))[::-1]
    return CacheSlotCurve(np.ones(len(ordered)), ordered, len(ordered) + more_rows, cache_slot_bytes, cold)


def test_misses_are_what_the_cache_slots_do_not_save() -> None:
    some = CacheSlotCurve(np.array([2.0, 4.0]), np.array([1.5, 0.25]), 8, 100, cold=0.5)
    assert [some.misses(slots) for slots in (0, 1.5, 4, 7)] == pytest.approx([4.5, 2.25, 1.0, 0.5])
    assert some.misses(8) == 0.0, "every row has a cache slot"


@settings(max_examples=150, deadline=None)
@given(st.lists(saved_lists, min_size=1, max_size=3), st.integers(0, 20))
def test_small_cases_of_equal_cache_slots_lack_one_each_to_the_best_of_all_divisions(
    groups: list[list[float]], cache_slots: int
) -> None:
    curves = [curve(saved, more_rows=1) for saved in groups]
    budget = 100 * (cache_slots + 2 * len(groups)) + 50
    found = divide_cache_slots(curves, budget)
    best = min(
        total_misses(curves, counts)
        for counts in itertools.product(*(range(1, each.home_rows + 1) for each in curves))
        if 100 * (sum(counts) + len(groups)) <= budget
    )
    assert total_misses(curves, found) <= best + 1e-9


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(saved_lists, st.integers(0, 30), st.integers(20, 300)), min_size=1, max_size=4),
    st.floats(0, 6000),
)
def test_never_over_the_budget(groups: list[tuple[list[float], int, int]], budget: float) -> None:
    curves = [curve(saved, more_rows=more, cache_slot_bytes=size) for saved, more, size in groups]
    sizes = [one.cache_slot_bytes for one in curves]
    found = divide_cache_slots(curves, budget)
    assert np.dot(found, sizes) <= max(budget, sum(sizes))
    assert all(1 <= count <= one.home_rows for count, one in zip(found, curves, strict=True))


def test_memory_that_saves_nothing_goes_to_rows_without_a_cache_slot() -> None:
    assert divide_cache_slots([curve([0.5], more_rows=99), curve([0.5], more_rows=299)], 20_000) == [50, 149]


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


TABLES = [
    flexd.EmbeddingTable("item", 300, 4), flexd.EmbeddingTable("shop", 200, 16), flexd.EmbeddingTable("tag", 5, 8)
]  # fmt: skip


def made(fast_memory_bytes: int | None) -> flexd.EmbeddingCollection:
    return flexd.EmbeddingCollection(TABLES, optimizer=flexd.Adam(0.05), fast_memory_bytes=fast_memory_bytes, seed=3)


def step(collection: flexd.EmbeddingCollection, seed: int, hot: str = "") -> float:
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
    return int(
        np.dot(cache_slots_of(collection), [store.row_bytes + CACHE_SLOT_BYTES for store in collection.engine.stores])
    )


def test_cache_slots_follow_the_use_and_rows_are_those_of_fast_rows() -> None:
    slow, fast = made(12_000), made(None)
    by_rows, budget = cache_slots_of(slow), used_bytes(slow)
    (division,) = divisions(slow)
    seen = []
    for hot in ("item", "shop"):
        for seed in range(100):
            assert step(slow, seed, hot) == step(fast, seed, hot)
        seen.append(cache_slots_of(slow))
        assert used_bytes(slow) <= budget + 3 * max(store.row_bytes + CACHE_SLOT_BYTES for store in slow.engine.stores)
    assert seen[0][0] > 1.2 * by_rows[0], "cache slots for the table that is used"
    assert seen[1][1] > 1.2 * seen[0][1], "and, after its use has moved, for the other one"
    assert 2 <= division.changes <= 200 // tiered_storage.LEAST_STEPS
    mine, theirs = (whole(each) for each in (slow, fast))
    assert {key: value.tobytes() for key, value in mine.items()} == {k: v.tobytes() for k, v in theirs.items()}
    slow.close()
    fast.close()


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
