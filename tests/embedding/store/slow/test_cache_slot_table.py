"""Cache slots: rows keep theirs while they are in use, and those that leave have the lowest scores of all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable

CPU = torch.device("cpu")


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def step(table: CacheSlotTable, at: int, rows: torch.Tensor) -> list[int]:
    """Bring rows in, use and change them; return the slots that left."""
    arrivals = table.bring(rows)
    assert torch.equal(table.find(rows), arrivals.cache_slots)
    table.use(arrivals.cache_slots, at)
    table.changed(arrivals.cache_slots)
    table.release(arrivals.cache_slots)
    return sorted(arrivals.leaving.changed.tolist())


def test_rows_in_use_do_not_leave_and_a_refusal_changes_nothing() -> None:
    table = CacheSlotTable(3, 99, CPU)
    kept = table.bring(slots(1, 2)).cache_slots
    table.use(kept, 1)
    with pytest.raises(SlowMemoryError, match="of 3 cache slots of fast memory 2 hold rows in use: 1 more"):
        table.bring(slots(2, 3, 4))
    assert len(table) == 2
    table.release(kept)
    assert step(table, 2, slots(3, 4)) == [], "what was not changed is not written"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(4, 40),
    st.sampled_from([3.0, 50.0]),
    st.lists(
        st.tuples(st.sets(st.integers(0, 120), min_size=1, max_size=12), st.booleans(), st.sampled_from([True, False])),
        max_size=60,
    ),
)
def test_what_leaves_is_what_a_search_of_all_cache_slots_finds(
    cache_slots: int, half_life: float, batches: list[tuple[set[int], bool, bool]]
) -> None:
    """Batches of look-ups, which are uses of their rows, and of updates, which are none."""
    table = CacheSlotTable(cache_slots, 120, CPU)
    score: dict[int, float] = {}
    waiting: list[torch.Tensor] = []
    pinned: list[set[int]] = []
    for at, (chosen, waits, uses) in enumerate(batches, start=1):
        rows = slots(*sorted(chosen))
        held = set().union(*pinned) | chosen
        room = cache_slots - len([slot for slot in score if slot in held])
        missing = [slot for slot in rows.tolist() if slot not in score]
        if len(missing) > room:
            with pytest.raises(SlowMemoryError):
                table.bring(rows)
            continue
        before = set(score)
        arrivals = table.bring(rows)
        now = {slot for slot in range(121) if table.find(slots(slot)).item() >= 0}
        left = before - now
        assert now == (before | chosen) - left
        assert len(left) == max(0, len(before) + len(missing) - cache_slots)
        could = sorted(value for slot, value in score.items() if slot not in held)
        assert sorted(score[slot] for slot in left) == pytest.approx(could[: len(left)])
        for slot in left:
            del score[slot]
        come = arrivals.cache_slots[arrivals.missing]
        table.remember(come, torch.full((len(come),), -math.inf, dtype=torch.float64))
        score |= dict.fromkeys(missing, -math.inf)
        for slot in chosen if uses else ():
            old = score[slot]
            score[slot] = math.log2(2 ** (old - at / half_life) + 1) + at / half_life
        if uses:
            table.use(arrivals.cache_slots, at / half_life)
        waiting.append(arrivals.cache_slots)
        pinned.append(chosen)
        while waiting and not (waits and len(waiting) < 3):
            table.release(waiting.pop(0))
            pinned.pop(0)
    assert len(table) == len(score)
