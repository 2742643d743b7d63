"""Cache slots: rows in use or known ahead keep theirs, and those that leave have the lowest scores of all."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SlowMemoryError
from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable, LookAhead

CPU = torch.device("cpu")


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


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
            with pytest.raises(
                SlowMemoryError, match=r"of \d+ cache slots of fast memory \d+ hold rows in use: \d+ more"
            ):
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


SLOTS = 40


def fetch(table: CacheSlotTable, ahead: LookAhead, rows: torch.Tensor, step: int) -> set[int]:
    arrivals = table.bring(rows)
    new = arrivals.cache_slots[arrivals.missing]
    table.remember(new, torch.full((len(new),), -torch.inf, dtype=torch.float64))
    table.use(arrivals.cache_slots, step, ahead=ahead.use_of(rows))
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
    for batch in batches[:depth]:
        ahead.add(slots(*sorted(batch)))
    for number, batch in enumerate(batches):
        if number:
            ahead.add(slots(*sorted(batches[number + depth - 1] if number + depth - 1 < len(batches) else ())))
        if number == ends:
            ahead.end()
        ahead.begin(1)
        if number == ends:
            break
        before = held(table)
        left = fetch(table, ahead, slots(*sorted(batch)), number + 1)
        known = [*batches[max(0, number - 1) : number + 1], *batches[number + 1 : number + depth]]
        nearest = {row: place for place, rows in reversed(list(enumerate(known))) for row in rows}
        far = len(known)
        if left:
            stayed = before - left - batch
            soonest = min(nearest.get(row, far) for row in left)
            assert all(nearest.get(row, far) <= soonest or nearest.get(row, far) == far for row in stayed), (
                "a row that is needed later stayed"
            )
            assert soonest == far or all(nearest.get(row, far) < far for row in stayed)
    else:
        return
    assert ahead.nbytes == 0
    cache_slots_in_use = table.find(slots(*sorted(held(table))))
    assert torch.equal(table._scores[cache_slots_in_use], table._counts[cache_slots_in_use]), (
        "rows stay by their counts"
    )


def test_a_row_that_a_batch_did_not_use_is_let_go() -> None:
    """It was announced and then read from a copy, say. Its cache slot is free for others two batches later."""
    table = CacheSlotTable(3, SLOTS, CPU)
    ahead = LookAhead(table)
    fetch(table, ahead, slots(7), 1)
    ahead.add(slots(1, 7))
    ahead.begin(1)
    fetch(table, ahead, slots(1), 2)
    fetch(table, ahead, slots(2), 3)
    assert fetch(table, ahead, slots(3), 4) == {2}, "7 and 1 are expected"
    for _ in range(2):
        ahead.add(slots())
        ahead.begin(1)
    assert fetch(table, ahead, slots(4, 5), 5) <= {7, 1, 3}
    assert fetch(table, ahead, slots(6), 6) & {7, 1, 3}
    assert 7 not in held(table)
