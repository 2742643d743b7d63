"""Which rows fast memory should hold: misses of flexd's frames, counted on steps; nothing here depends on the clock.

A step uses each distinct row of its batch once, so a distinct row is the unit. Misses are counted over the last three
quarters of the steps, fast memory holds a share of the rows that are ever used. ``ahead K`` knows the K batches after
the present one; with all of them it is Belady's choice, which nothing beats.

misses: batches of Zipf's law. traces (``--trace``): batches of consecutive accesses. Static: the most frequent rows of
the first quarter.

Checks: fewer misses than LRU everywhere; with four batches known at most 1.25 times Belady's, of traces at 5 % of the
rows.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexd.embedding.store.slow.frame_table import FrameTable
from flexd.embedding.store.slow.half_life import HalfLife
from flexd.stream.trace import Trace, load_trace
from tools.bench.harness import Outcome, Skipped, at_most, check
from tools.bench.programs.memory import batches

Int64Array = npt.NDArray[np.int64]
SHARES, QUICK_SHARES = (0.01, 0.05, 0.1), (0.05,)
AHEADS = (0, 1, 4)
ROWS_DIVIDED, IDS_DIVIDED = 100, 10
"""Table and look-ups of a step are made smaller by these, so that some hundred steps fill the frames many times over:
before that every policy misses alike."""
SHARE = 0.05
"""Of the rows, in frames."""
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


def missed_by_frames(steps: Steps, frames: int, half_life: float | None, ahead: int) -> tuple[float, float]:
    """Return misses a distinct row, and microseconds a row of the table's own work.

    Args:
        half_life: of counts, in rows used for each frame; 0: the last use counts (LRU); None: chosen live (flexd).
    """
    device = torch.device("cpu")
    table = FrameTable(frames, steps.distinct, device, half_life=1.0 if half_life is None else half_life)
    live = HalfLife(frames, steps.distinct, device) if half_life is None else None
    kept = torch.full((steps.distinct,), -math.inf, dtype=torch.float64)
    rows, next_step = torch.from_numpy(steps.rows), torch.from_numpy(steps.next_step)
    missed, began, seconds, clock_of_uses = 0, steps.first_counted, 0.0, 0.0
    for step in range(len(steps)):
        mine = slice(int(steps.starts[step]), int(steps.starts[step + 1]))
        batch, following = rows[mine], next_step[mine]
        clock = time.perf_counter()
        arrivals = table.bring(batch)
        kept[arrivals.evicted_slots] = arrivals.evicted_counts
        known = torch.where(following <= step + ahead, following, 0) if ahead else None
        come = arrivals.missing
        table.remember(arrivals.frames[come], kept[batch[come]])
        clock_of_uses = clock_of_uses + len(batch) / frames if live is None else live.use(batch, ahead)
        table.use(arrivals.frames, clock_of_uses, ahead=known)
        table.changed(arrivals.frames)
        table.release(arrivals.frames)
        if 0 < ahead < len(steps) and step + ahead + 1 < len(steps):
            # The batch that is known from now on: those of its rows that are not used before it.
            entering = rows[steps.starts[step + ahead + 1] : steps.starts[step + ahead + 2]]
            found = table.find(entering)
            table.expect(found[found >= 0], step + ahead + 1)
        seconds += time.perf_counter() - clock
        if step >= began:
            missed += len(arrivals.missing)
    total = int(steps.starts[-1] - steps.starts[began])
    return missed / total, seconds / len(steps.rows) * 1e6


def missed_by_static(steps: Steps, frames: int) -> float:
    first = steps.rows[: steps.starts[steps.first_counted]]
    top = np.argsort(-np.bincount(first, minlength=steps.distinct), kind="stable")[:frames]
    fixed = np.zeros(steps.distinct, dtype=np.bool_)
    fixed[top] = True
    return float((~fixed[steps.rows[steps.starts[steps.first_counted] :]]).mean())


def of_trace(path: Path, batch: int, shares: Sequence[float]) -> dict[str, dict[str, float]]:
    """Return misses a distinct row by share of the rows in frames and policy."""
    steps = Steps.of(keys_of(load_trace(path)), batch)
    answer: dict[str, dict[str, float]] = {}
    for share in shares:
        frames = max(int(np.diff(steps.starts).max()) + 1, int(steps.distinct * share))
        ours = {"frames": float(frames), "static": missed_by_static(steps, frames)}
        ours["LRU"], _ = missed_by_frames(steps, frames, 0.0, 0)
        for ahead in AHEADS:
            ours[f"ahead {ahead}"], ours[f"ahead {ahead}, microseconds a row"] = missed_by_frames(
                steps, frames, None, ahead
            )
        ours["Belady"], _ = missed_by_frames(steps, frames, 20.0, len(steps) + 1)
        answer[f"{share:g}"] = ours
    return answer


def keys_of(trace: Trace) -> Int64Array:
    """Return all accesses of a trace in its order, the tables' rows numbered one after another."""
    first: Int64Array = np.concatenate([[0], np.cumsum(trace.table_rows)])
    return first[trace.table] + trace.row


def checks_of_trace(name: str, answer: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    checks = []
    for share, ours in answer.items():
        for ahead in AHEADS:
            ratio = ours[f"ahead {ahead}"] / ours["LRU"]
            checks.append(check(f"{name}, {share}: ahead {ahead} / LRU", ratio, "< 1", ratio < 1))
        if share == "0.05":
            checks.append(at_most(f"{name}, {share}: ahead 4 / Belady", ours["ahead 4"] / ours["Belady"], 1.25))
    return checks


def checks_of_misses(zipf: float, of: dict[str, float]) -> list[dict[str, Any]]:
    ratio = of["flexd"] / of["LRU"]
    known = of[f"flexd, {AHEAD} ahead"] / of["Belady"]
    return [
        check(f"Zipf {zipf:g}: misses / LRU's", ratio, "< 1", ratio < 1),
        at_most(f"Zipf {zipf:g}: misses with {AHEAD} batches known / Belady's", known, 1.25),
    ]


def misses(rows: int, ids: int, zipf: float, steps: int) -> dict[str, float]:
    """Return misses a distinct row with 5 % of the rows in frames, over the last three quarters of the steps."""
    rows, ids = rows // ROWS_DIVIDED, ids // IDS_DIVIDED
    drawn = batches(rows, ids, zipf, seed=2)
    steps_of = Steps.of(np.concatenate([next(drawn).numpy() for _ in range(steps)]), ids)
    frames = max(int(np.diff(steps_of.starts).max()) + 1, int(rows * SHARE))
    return {
        "LRU": missed_by_frames(steps_of, frames, 0.0, 0)[0],
        "flexd": missed_by_frames(steps_of, frames, None, 0)[0],
        f"flexd, {AHEAD} ahead": missed_by_frames(steps_of, frames, None, AHEAD)[0],
        "Belady": missed_by_frames(steps_of, frames, 1.0, len(steps_of) + 1)[0],
    }


def misses_section(options: Namespace) -> Outcome:
    torch.set_num_threads(1)
    zipfs, rows, steps = ([1.05], 4_000_000, 200) if options.quick else (options.zipf, 25_200_000, 800)
    figures = {f"Zipf {zipf:g}": misses(rows, 25_600, zipf, steps) for zipf in zipfs}
    checks = [entry for zipf in zipfs for entry in checks_of_misses(zipf, figures[f"Zipf {zipf:g}"])]
    return Outcome(figures, checks)


def traces_section(options: Namespace) -> Outcome:
    if not options.trace:
        raise Skipped("needs --trace FILE.npz")
    torch.set_num_threads(1)
    figures, checks = {}, []
    for path in options.trace:
        figures[path.stem] = of_trace(path, options.batch, QUICK_SHARES if options.quick else SHARES)
        checks += checks_of_trace(path.stem, figures[path.stem])
    return Outcome(figures, checks)
