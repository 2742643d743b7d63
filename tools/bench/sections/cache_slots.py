"""Which rows fast memory should hold: misses of flexd's cache slots, counted on steps; nothing here depends on the
clock.

A step uses each distinct row of its batch once, so a distinct row is the unit. Misses are counted over the last three
quarters of the steps, fast memory holds a share of the rows that are ever used. ``ahead K`` knows the K batches after
the present one; with all of them it is Belady's choice, which nothing beats.

Batches are of Zipf's law. Checks: fewer misses than LRU; with four batches known at most 1.25 times Belady's.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding.store.slow.cache_slot_table import CacheSlotTable
from flexd.embedding.store.slow.half_life import HalfLife
from tools.bench.harness import Outcome, at_most, check
from tools.bench.programs.memory import batches

Int64Array = npt.NDArray[np.int64]
ROWS_DIVIDED, IDS_DIVIDED = 100, 10
"""Table and look-ups of a step are made smaller by these, so that some hundred steps fill the cache slots many times
over: before that every policy misses alike."""
SHARE = 0.05
"""Of the rows, in cache slots."""
AHEAD = 4


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


def checks_of_misses(zipf: float, of: dict[str, float]) -> list[dict[str, Any]]:
    ratio = of["flexd"] / of["LRU"]
    known = of[f"flexd, {AHEAD} ahead"] / of["Belady"]
    return [
        check(f"Zipf {zipf:g}: misses / LRU's", ratio, "< 1", ratio < 1),
        at_most(f"Zipf {zipf:g}: misses with {AHEAD} batches known / Belady's", known, 1.25),
    ]


def misses(rows: int, ids: int, zipf: float, steps: int) -> dict[str, float]:
    """Return misses a distinct row with 5 % of the rows in cache slots, over the last three quarters of the steps."""
    rows, ids = rows // ROWS_DIVIDED, ids // IDS_DIVIDED
    drawn = batches(rows, ids, zipf, seed=2)
    steps_of = Steps.of(np.concatenate([next(drawn).numpy() for _ in range(steps)]), ids)
    cache_slots = max(int(np.diff(steps_of.starts).max()) + 1, int(rows * SHARE))
    return {
        "LRU": missed_by_cache_slots(steps_of, cache_slots, 1e-9, 0),
        "flexd": missed_by_cache_slots(steps_of, cache_slots, None, 0),
        f"flexd, {AHEAD} ahead": missed_by_cache_slots(steps_of, cache_slots, None, AHEAD),
        "Belady": missed_by_cache_slots(steps_of, cache_slots, 1.0, len(steps_of) + 1),
    }


def misses_section(options: Namespace) -> Outcome:
    torch.set_num_threads(1)
    zipfs, rows, steps = ([1.05], 4_000_000, 200) if options.quick else (options.zipf, 25_200_000, 800)
    figures = {f"Zipf {zipf:g}": misses(rows, 25_600, zipf, steps) for zipf in zipfs}
    checks = [entry for zipf in zipfs for entry in checks_of_misses(zipf, figures[f"Zipf {zipf:g}"])]
    return Outcome(figures, checks)
