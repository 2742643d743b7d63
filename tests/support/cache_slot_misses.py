"""Misses of cache slots, counted on steps.

A step uses each distinct row of its batch once, so a distinct row is the unit. Misses are counted over the last three
quarters of the steps. Known are some batches after the present one; with all of them the choice is Belady's, which
nothing beats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable
from flexd.embedding.store.slow.half_life import HalfLife

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """Distinct rows of each batch, joined.

    Attributes:
        rows: int64 [n] rows, numbered from 0 over all that occur.
        starts: int64 [steps + 1].
        next_step: int64 [n], the step of the row's next use, ``len(starts)`` where there is none.
    """

    rows: Int64Array
    starts: Int64Array
    next_step: Int64Array
    distinct: int

    @classmethod
    def of(cls, keys: Int64Array, batch: int) -> Steps:
        distinct, numbers = np.unique(keys, return_inverse=True)
        batches = [np.unique(numbers[at : at + batch]) for at in range(0, len(numbers) - batch + 1, batch)]
        rows, sizes = np.concatenate(batches).astype(np.int64), [len(one) for one in batches]
        step = np.repeat(np.arange(len(batches)), sizes)
        order = np.argsort(rows, kind="stable")
        same = rows[order][1:] == rows[order][:-1]
        next_step = np.full(len(rows), len(batches) + 1)
        next_step[order[:-1][same]] = step[order[1:][same]]
        return cls(rows, np.concatenate([[0], np.cumsum(sizes)]), next_step, len(distinct))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def first_counted(self) -> int:
        return len(self) // 4


def missed_by_cache_slots(steps: Steps, cache_slots: int, half_life: float | None, ahead: int) -> float:
    """Return misses a distinct row.

    Args:
        half_life: of counts, in rows used for each cache slot; near 0: the last use counts (LRU); None: chosen live
            (flexd).
    """
    device = torch.device("cpu")
    table = CacheSlotTable(cache_slots, steps.distinct, device)
    live = HalfLife(cache_slots, steps.distinct, device)
    kept = torch.full((steps.distinct,), -math.inf, dtype=torch.float64)
    rows, next_step = torch.from_numpy(steps.rows), torch.from_numpy(steps.next_step)
    missed, began, clock_of_uses = 0, steps.first_counted, 0.0
    for step in range(len(steps)):
        mine = slice(int(steps.starts[step]), int(steps.starts[step + 1]))
        batch, following = rows[mine], next_step[mine]
        arrivals = table.bring(batch)
        kept[arrivals.leaving.changed] = arrivals.leaving.counts
        known = torch.where(following <= step + ahead, following, 0) if ahead else None
        come = arrivals.missing
        table.remember(arrivals.cache_slots[come], kept[batch[come]])
        if half_life is None:
            clock_of_uses = live.use(batch, ahead)
        else:
            clock_of_uses += len(batch) / cache_slots / half_life
        table.use(arrivals.cache_slots, clock_of_uses, ahead=known)
        table.changed(arrivals.cache_slots)
        table.release(arrivals.cache_slots)
        if 0 < ahead < len(steps) and step + ahead + 1 < len(steps):
            # The batch that is known from now on: those of its rows that are not used before it.
            entering = rows[steps.starts[step + ahead + 1] : steps.starts[step + ahead + 2]]
            found = table.find(entering)
            table.expect(found[found >= 0], step + ahead + 1)
        if step >= began:
            missed += len(arrivals.missing)
    total = int(steps.starts[-1] - steps.starts[began])
    return missed / total
