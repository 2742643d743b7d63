#!/usr/bin/env python3
"""Misses that the planner's curve predicts, beside those of the runtime's frame table on the same trace.

    python tools/bench_fast_memory.py --trace ask_ubuntu.npz --trace orm_night.npz [--quick] [--json]

A trace is cut into batches of consecutive accesses of all ranks; one rank holds all rows, so a step uses each distinct
row of its batch once. Every second table has rows of twice the dim, so that there are two dim-groups whose frames share
a budget of 2, 5, 10 or 20 % of the bytes of all rows that occur. Touches are counted in the first half of the trace, as
a daemon knows them, and beside it in the half that is replayed ("same half": what the curve itself is worth). The
second half is then replayed through the frame tables, which have seen the first: frames divided by the plan, and in
proportion to rows.

Misses are rows read from slow memory a step. The curve assumes that the most frequent rows stay, and that accesses are
independent of each other; where they are not, measured over predicted shows it.

Checks: the plan's division is not above the one by rows, measured, by more than 2 %; measured over predicted by the
touches of the half that is replayed lies in 0.5 to 2.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from bench_frames import keys_of
from bench_report import check, ending

from flexd.core.fast_memory import FRAME_BYTES
from flexd.embedding.store.slow.frame_table import FrameTable
from flexd.embedding.store.slow.half_life import HalfLife
from flexd.planner.memory.division import FastMemoryDivision, divide, priced, proportional
from flexd.planner.memory.miss_curve import MissCurve
from flexd.stream.trace import Trace, load_trace

Int64Array = npt.NDArray[np.int64]
SHARES, QUICK_SHARES = (0.02, 0.05, 0.1, 0.2), (0.05,)
ROW_BYTES = (64 * 4 + 4, 128 * 4 + 4)
"""A row of float32 with a row-wise state, by dim-group."""


class Halves:
    """Distinct rows by dim-group and step, rows numbered from 0 in each dim-group."""

    def __init__(self, trace: Trace, batch: int) -> None:
        group = trace.table.astype(np.int64) % 2
        self.steps = len(group) // batch
        self.rows: list[list[Int64Array]] = []
        self.distinct: list[int] = []
        keys = keys_of(trace)
        for one in range(2):
            mine = group == one
            distinct, numbers = np.unique(keys[mine], return_inverse=True)
            bounds = np.searchsorted(np.flatnonzero(mine), np.arange(self.steps + 1) * batch)
            self.rows.append([np.unique(numbers[a:b]) for a, b in pairwise(bounds)])
            self.distinct.append(len(distinct))

    def curves(self, steps: range) -> list[MissCurve]:
        """Curves of the touches counted in these steps."""
        made = []
        for rows, distinct, row_bytes in zip(self.rows, self.distinct, ROW_BYTES, strict=True):
            counts = np.bincount(np.concatenate([rows[at] for at in steps]), minlength=distinct)
            classes, number = np.unique(counts[counts > 0], return_counts=True)
            made.append(
                MissCurve(
                    classes[::-1] / len(steps), number[::-1].astype(np.float64), distinct, row_bytes + FRAME_BYTES
                )
            )
        return made

    def measured(self, frames: Sequence[int]) -> list[float]:
        """Misses a step and dim-group in the second half."""
        return [
            missed(rows, distinct, count, self.steps // 2)
            for rows, distinct, count in zip(self.rows, self.distinct, frames, strict=True)
        ]


def missed(rows: Sequence[Int64Array], distinct: int, frames: int, counted_from: int) -> float:
    """Replay; of a batch of more rows than frames one part comes after the other, for the look-up and the update."""
    table = FrameTable(frames, distinct, torch.device("cpu"), half_life=1.0)
    half_life = HalfLife(frames, distinct, torch.device("cpu"))
    kept = torch.full((distinct,), -math.inf, dtype=torch.float64)
    found = 0
    for step, mine in enumerate(rows):
        batch = torch.from_numpy(mine)
        for update in (False, True):
            for part in batch.split(frames):
                arrivals = table.bring(part)
                kept[arrivals.evicted_slots] = arrivals.evicted_counts
                come = arrivals.missing
                if len(come):
                    table.remember(arrivals.frames[come], kept[part[come]])
                if update:
                    table.changed(arrivals.frames)
                else:
                    table.use(arrivals.frames, half_life.use(part, 0))
                table.release(arrivals.frames)
                found += len(come) * (step >= counted_from)
    return found / (len(rows) - counted_from)


def run(path: Path, batch: int, shares: Sequence[float]) -> dict[str, Any]:
    halves = Halves(load_trace(path), batch)
    middle = halves.steps // 2
    known, true = halves.curves(range(middle)), halves.curves(range(middle, halves.steps))
    whole = sum(curve.home_rows * curve.frame_bytes for curve in known)
    print(f"\n{path.stem}: {halves.steps} batches of {batch:,}, rows {halves.distinct}; misses a step")
    print(
        f"{'fast':>6} {'division':<12} {'frames':>16} {'predicted':>10} {'measured':>9} {'ratio':>6} "
        f"{'same half':>10} {'ratio':>6}"
    )
    answer: dict[str, Any] = {"name": path.stem, "distinct": halves.distinct}
    for share in shares:
        divisions: dict[str, FastMemoryDivision] = {
            "by the plan": divide(known, share * whole, 1.0), "by rows": proportional(known, share * whole, 1.0)
        }  # fmt: skip
        answer[f"{share:g}"] = {}
        for name, division in divisions.items():
            measured = sum(halves.measured(division.frames.tolist()))
            predicted = float(division.misses.sum())
            same = float(priced(division.frames, division.slots, true, [], np.ones(2)).misses.sum())
            frames = " + ".join(f"{count:,}" for count in division.frames.tolist())
            print(
                f"{share:>6.0%} {name:<12} {frames:>16} {predicted:>10,.1f} {measured:>9,.1f} "
                f"{measured / predicted:>6.2f} {same:>10,.1f} {measured / same:>6.2f}"
            )
            answer[f"{share:g}"][name] = {
                "frames": division.frames.tolist(), "predicted": predicted, "same_half": same, "measured": measured
            }  # fmt: skip
    return answer


def checks_of(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    checks = []
    for answer in answers:
        for share, found in answer.items():
            if share in ("name", "distinct"):
                continue
            label, plan = f"{answer['name']}, {share}", found["by the plan"]
            worse = plan["measured"] / found["by rows"]["measured"]
            checks.append(check(f"{label}: by the plan / by rows, measured", worse, "<= 1.02", worse <= 1.02))
            ratio = plan["measured"] / plan["same_half"]
            checks.append(check(f"{label}: measured / predicted, same half", ratio, "0.5..2", 0.5 <= ratio <= 2))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", required=True, metavar="FILE.npz")
    parser.add_argument("--batch", type=int, default=16_384, help="accesses of a batch of all ranks")
    parser.add_argument("--quick", action="store_true", help="5 %% of the bytes alone")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    answers = [run(path, arguments.batch, QUICK_SHARES if arguments.quick else SHARES) for path in arguments.trace]
    return ending(answers, checks_of(answers), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
