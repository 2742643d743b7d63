"""Cache slots beside an independent simulator: what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.cache_slot_misses import Steps, missed_by_cache_slots
from tools.bench.programs.memory import batches

KEYS = np.array([7, 7, 9, 5, 5, 9, 7, 8, 9, 9, 5, 7] * 20)


def test_a_step_uses_each_distinct_row_once_and_knows_its_next_use() -> None:
    steps = Steps.of(KEYS[:12], 3)
    assert steps.rows.tolist() == [1, 3, 0, 3, 1, 2, 3, 0, 1, 3]
    assert steps.starts.tolist() == [0, 2, 4, 7, 10]
    assert steps.next_step.tolist() == [2, 1, 3, 2, 3, 5, 3, 5, 5, 5]
    assert (len(steps), steps.distinct, steps.first_counted) == (4, 4, 1)


def missed_by_search(steps: Steps, cache_slots: int, ahead: bool) -> float:
    """Belady's choice, or the least recently used, by a search of all rows; the rows of a batch stay."""
    held: dict[int, int] = {}
    missed = 0
    for step in range(len(steps)):
        mine = range(steps.starts[step], steps.starts[step + 1])
        batch = {int(steps.rows[at]): int(steps.next_step[at]) for at in mine}
        for row in batch.keys() - held.keys():
            missed += step >= steps.first_counted
            if len(held) == cache_slots:
                free = held.keys() - batch.keys()
                del held[max(free, key=lambda one: held[one] if ahead else -held[one])]
            held[row] = batch[row] if ahead else step
        held |= batch if ahead else dict.fromkeys(batch, step)
    return missed / int(steps.starts[-1] - steps.starts[steps.first_counted])


@pytest.mark.parametrize("cache_slots", [8, 20])
def test_misses_are_those_of_a_search(cache_slots: int) -> None:
    weights = 1.0 / np.arange(1, 61)
    keys = np.random.default_rng(1).choice(60, 900, p=weights / weights.sum())
    steps, single = Steps.of(keys, 5), Steps.of(keys, 1)  # in single rows no two have the same last use
    lru = missed_by_cache_slots(single, cache_slots, 1e-9, 0)
    assert lru == pytest.approx(missed_by_search(single, cache_slots, ahead=False))
    belady = missed_by_cache_slots(steps, cache_slots, 20.0, len(steps) + 1)
    assert belady == pytest.approx(missed_by_search(steps, cache_slots, ahead=True))
    assert (
        belady
        <= missed_by_cache_slots(steps, cache_slots, 20.0, 2)
        <= missed_by_cache_slots(steps, cache_slots, 20.0, 0)
    )


def test_counts_miss_less_than_last_uses_and_four_known_batches_nearly_as_little_as_all() -> None:
    rows, ids, steps = 40_000, 2_560, 200
    drawn = batches(rows, ids, 1.05, seed=2)
    known = Steps.of(np.concatenate([next(drawn).numpy() for _ in range(steps)]), ids)
    cache_slots = max(int(np.diff(known.starts).max()) + 1, rows // 20)
    counted = missed_by_cache_slots(known, cache_slots, None, 0)
    assert counted < missed_by_cache_slots(known, cache_slots, 1e-9, 0)
    belady = missed_by_cache_slots(known, cache_slots, 1.0, len(known) + 1)
    assert missed_by_cache_slots(known, cache_slots, None, 4) <= 1.25 * belady
