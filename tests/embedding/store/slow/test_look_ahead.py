"""Rows that stay in cache slots while batches ahead are known."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable, LookAhead

CPU = torch.device("cpu")
SLOTS = 40


def slots_of(numbers: set[int]) -> torch.Tensor:
    return torch.tensor(sorted(numbers), dtype=torch.int64)


def fetch(table: CacheSlotTable, ahead: LookAhead, slots: torch.Tensor, step: int) -> set[int]:
    """Look rows up, and return those that left."""
    arrivals = table.bring(slots)
    new = arrivals.cache_slots[arrivals.missing]
    table.remember(new, torch.full((len(new),), -torch.inf, dtype=torch.float64))
    table.use(arrivals.cache_slots, step, ahead=ahead.use_of(slots))
    table.release(arrivals.cache_slots)
    return set(arrivals.leaving.slots.tolist())


def held(table: CacheSlotTable) -> set[int]:
    return {slot for slot in range(SLOTS) if int(table.find(torch.tensor([slot]))) >= 0}


batches_of_rows = st.lists(st.sets(st.integers(0, SLOTS - 1), max_size=6), min_size=1, max_size=14)


@settings(max_examples=80, deadline=None)
@given(batches=batches_of_rows, depth=st.integers(1, 5), cache_slots=st.integers(12, 20), ends=st.integers(0, 13))
def test_no_row_of_a_known_batch_leaves_for_one_that_is_not_known(
    batches: list[set[int]], depth: int, cache_slots: int, ends: int
) -> None:
    """Rows of the present batch, the one before it (whose update is to come) and known ones stay while others go; of
    the known ones the farthest go first. A loop may end at any batch: then rows stay by their counts alone."""
    table = CacheSlotTable(cache_slots, SLOTS, CPU)
    ahead = LookAhead(table)
    for slots in batches[:depth]:
        ahead.add(slots_of(slots))
    for number, slots in enumerate(batches):
        if number:
            ahead.add(slots_of(batches[number + depth - 1]) if number + depth - 1 < len(batches) else slots_of(set()))
        if number == ends:
            ahead.end()
        ahead.begin(1)
        if number == ends:
            break
        before = held(table)
        left = fetch(table, ahead, slots_of(slots), number + 1)
        known = [*batches[max(0, number - 1) : number + 1], *batches[number + 1 : number + depth]]
        nearest = {row: place for place, rows in reversed(list(enumerate(known))) for row in rows}
        far = len(known)
        if left:
            stayed = before - left - slots
            soonest = min(nearest.get(row, far) for row in left)
            assert all(nearest.get(row, far) <= soonest or nearest.get(row, far) == far for row in stayed), (
                "a row that is needed later stayed"
            )
            assert soonest == far or all(nearest.get(row, far) < far for row in stayed)
    else:
        return
    assert ahead.nbytes == 0
    scores = table._scores[table.find(slots_of(held(table)))]
    assert bool((scores == table._counts[table.find(slots_of(held(table)))]).all()), "rows stay by their counts"


def test_a_row_that_a_batch_did_not_use_is_let_go() -> None:
    """It was announced and then read from a copy, say. Its cache slot is free for others two batches later."""
    table = CacheSlotTable(3, SLOTS, CPU)
    ahead = LookAhead(table)
    fetch(table, ahead, slots_of({7}), 1)
    ahead.add(slots_of({7, 1}))
    ahead.begin(1)
    fetch(table, ahead, slots_of({1}), 2)
    fetch(table, ahead, slots_of({2}), 3)
    assert fetch(table, ahead, slots_of({3}), 4) == {2}, "7 and 1 are expected"
    for _ in range(2):
        ahead.add(slots_of(set()))
        ahead.begin(1)
    assert fetch(table, ahead, slots_of({4, 5}), 5) <= {7, 1, 3}
    assert fetch(table, ahead, slots_of({6}), 6) & {7, 1, 3}
    assert 7 not in held(table)
