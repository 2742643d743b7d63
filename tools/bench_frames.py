#!/usr/bin/env python3
"""Which rows fast memory should hold: misses of flexd's frames beside policies of an independent simulator.

    python tools/bench_frames.py --trace online_retail.npz --trace ask_ubuntu.npz [--quick] [--json] [--restart]

A trace is cut into batches of consecutive accesses; a step uses each distinct row of its batch once, so a distinct row
is the unit. Misses are counted over the last three quarters of the steps, fast memory holds a share of the rows that
the trace ever uses. ``ahead K`` knows the K batches after the present one; with all of them it is Belady's choice,
which nothing beats. Static: the most frequent rows of the first quarter.

libcachesim (PyPI) replays the same rows with policies that people use: of each batch first those that it holds, then
the others, as a step does. Without it its columns are missing. A frame is taken while its row is in use; a policy that
sees one row after another may drop a row of the batch for the next one, so its Belady misses less than a step can.
Ours is trusted because on single rows, where the two are the same, LRU and Belady must agree with libcachesim's.

``--restart`` instead: the second half of the trace after a restart, which begins with empty frames, and what it would
be worth to know more: the daemon's rates of all rows in the first half as their first counts, with empty frames or with
the rows of the highest rates in them; beside it the run that was never interrupted.

Checks: LRU and Belady on single rows within 1 % of libcachesim's; at 5 % of the rows with four batches ahead at most
1.25 times the misses of libcachesim's Belady, and fewer than LRU everywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from bench_report import check, ending

from flexd.embedding.store.slow.frame_table import FrameTable
from flexd.embedding.store.slow.half_life import HALF_LIVES, HalfLife
from flexd.stream.trace import Trace, load_trace

Int64Array = npt.NDArray[np.int64]
SHARES, QUICK_SHARES = (0.01, 0.05, 0.1), (0.05,)
AHEAD = (0, 1, 4)
SINGLE_SHARE = 0.1
PEERS = ("S3FIFO", "ARC", "WTinyLFU")


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


def missed_by_frames(
    steps: Steps, frames: int, half_life: float | None, ahead: int, *, touches: torch.Tensor | None = None
) -> tuple[float, float]:
    """Return misses a distinct row, and microseconds a row of the table's own work.

    Args:
        half_life: of counts, in rows used for each frame; 0: the last use counts (LRU); None: chosen live (flexd).
        touches: float64 [distinct rows], the true probability of a use, in place of counts.
    """
    device = torch.device("cpu")
    table = FrameTable(frames, steps.distinct, device, half_life=1.0 if half_life is None else half_life)
    live = HalfLife(frames, steps.distinct, device) if half_life is None else None
    kept = torch.full((steps.distinct,), -math.inf, dtype=torch.float64)
    if touches is not None:
        kept = torch.log2(touches)
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
        # A use before all time changes no count.
        table.use(arrivals.frames, clock_of_uses if touches is None else -math.inf, ahead=known)
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


def missed_by_library(steps: Steps, frames: int, policy: str) -> float:
    """Misses of libcachesim's policy: of each step the rows that it holds first."""
    import libcachesim

    cache = getattr(libcachesim, policy)(cache_size=frames)
    request = libcachesim.Request()
    request.obj_size = 1
    counted, missed, clock = steps.first_counted, 0, 0
    for step in range(len(steps)):
        mine = slice(int(steps.starts[step]), int(steps.starts[step + 1]))
        present, absent = [], []
        for row, later in zip(steps.rows[mine].tolist(), steps.next_step[mine].tolist(), strict=True):
            request.obj_id = row + 1
            (absent if cache.find(request, update_cache=False) is None else present).append((row + 1, later))
        for row, later in (*present, *absent):
            clock += 1
            request.obj_id, request.clock_time = row, clock
            # Steps that are never reached are infinitely far; equal distances within a step do not matter.
            request.next_access_vtime = later * steps.distinct if later <= len(steps) else 2**62
            cache.get(request)
        missed += len(absent) * (step >= counted)
    return missed / int(steps.starts[-1] - steps.starts[counted])


def agreement(keys: Int64Array, share: float) -> dict[str, float]:
    """Misses of single rows, ours over libcachesim's."""
    steps = Steps.of(keys, 1)
    frames = max(2, int(steps.distinct * share))
    return {
        "LRU": missed_by_frames(steps, frames, 0.0, 0)[0] / missed_by_library(steps, frames, "LRU"),
        "Belady": missed_by_frames(steps, frames, 20.0, len(steps) + 1)[0]
        / missed_by_library(steps, frames, "Belady"),
    }  # fmt: skip


def run(path: Path, batch: int, shares: Sequence[float], single: int, library: bool) -> dict[str, Any]:
    trace = load_trace(path)
    steps = Steps.of(keys_of(trace), batch)
    print(
        f"\n{path.stem}: {len(steps)} batches of {batch:,} accesses, {steps.distinct:,} rows, "
        f"{len(steps.rows) / len(steps):,.0f} distinct a batch; misses a distinct row"
    )
    answer: dict[str, Any] = {"name": path.stem}
    if library:
        answer["single"] = agreement(keys_of(trace)[:single], SINGLE_SHARE)
        words = ", ".join(f"{name} {ratio:.4f}" for name, ratio in answer["single"].items())
        print(f"single rows, misses over libcachesim's: {words} ({single:,} accesses)")
    for share in shares:
        frames = max(int(np.diff(steps.starts).max()) + 1, int(steps.distinct * share))
        ours: dict[str, float] = {"static": missed_by_static(steps, frames)}
        ours["LRU"], _ = missed_by_frames(steps, frames, 0.0, 0)
        for ahead in AHEAD:
            ours[f"ahead {ahead}"], ours[f"ahead {ahead}, microseconds a row"] = missed_by_frames(
                steps, frames, None, ahead
            )
        ours["Belady"], _ = missed_by_frames(steps, frames, 20.0, len(steps) + 1)
        theirs = {name: missed_by_library(steps, frames, name) for name in ("LRU", "Belady", *PEERS)} if library else {}
        answer[f"{share:g}"] = {"frames": frames, "flexd": ours, "libcachesim": theirs}
        print(f"{share:5.0%} of the rows ({frames:,} frames)")
        for title, figures in (("flexd", ours), ("libcachesim", theirs)):
            print(f"  {title:<12}" + "  ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return answer


RESTART_WAYS = ("empty", "rates", "rates, frames filled", "uninterrupted")
RATE_HALF_LIFE = 200.0
"""Of the daemon's rates, in steps: its sketches remember longer than frames count."""


def restarted(path: Path, batch: int, share: float) -> dict[str, dict[str, float]]:
    """Return misses a distinct row by way in the first 10, 30 and 100 steps of the second half, and in all."""
    steps = Steps.of(keys_of(load_trace(path)), batch)
    half, frames = len(steps) // 2, max(int(np.diff(steps.starts).max()) + 1, int(steps.distinct * share))
    before, steps_before = steps.rows[: steps.starts[half]], half
    age = np.repeat(half - 1 - np.arange(half), np.diff(steps.starts[: half + 1]))
    seen = np.bincount(before, weights=2.0 ** (-age / RATE_HALF_LIFE), minlength=steps.distinct)
    rates = torch.from_numpy(seen / (RATE_HALF_LIFE / math.log(2)))
    answer: dict[str, dict[str, float]] = {}
    print(
        f"\n{path.stem}: restarted after {half} of {len(steps)} batches of {batch:,}, {frames:,} frames ({share:.0%})"
    )
    for way in RESTART_WAYS:
        half_life = HALF_LIVES[2]
        table = FrameTable(frames, steps.distinct, torch.device("cpu"), half_life=half_life)
        kept = torch.full((steps.distinct,), -math.inf, dtype=torch.float64)
        if way.startswith("rates"):
            kept = torch.log2(rates * half_life * frames * steps_before / len(before) / math.log(2))
        if "filled" in way:
            popular = torch.topk(rates, min(frames, int((rates > 0).sum()))).indices
            come = table.bring(popular).frames
            table.remember(come, kept[popular])
            table.release(come)
        missed, used, clock, first = [], [], 0.0, 0 if way == "uninterrupted" else half
        for step in range(first, len(steps)):
            mine = torch.from_numpy(steps.rows[steps.starts[step] : steps.starts[step + 1]])
            arrivals = table.bring(mine)
            kept[arrivals.evicted_slots] = arrivals.evicted_counts
            table.remember(arrivals.frames[arrivals.missing], kept[mine[arrivals.missing]])
            clock += len(mine) / frames
            table.use(arrivals.frames, clock)
            table.changed(arrivals.frames)
            table.release(arrivals.frames)
            if step >= half:
                missed.append(len(arrivals.missing))
                used.append(len(mine))
        spans = {f"first {span}": slice(span) for span in (10, 30, 100)} | {"all": slice(None)}
        answer[way] = {name: sum(missed[span]) / sum(used[span]) for name, span in spans.items()}
        print(f"  {way:<22}" + "  ".join(f"{name} {value:.3f}" for name, value in answer[way].items()))
    return answer


def keys_of(trace: Trace) -> Int64Array:
    """Return all accesses of a trace in its order, the tables' rows numbered one after another."""
    first: Int64Array = np.concatenate([[0], np.cumsum(trace.table_rows)])
    return first[trace.table] + trace.row


def checks_of(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    checks = []
    for answer in answers:
        for share, figures in answer.items():
            if share == "name":
                continue
            if share == "single":
                for name, ratio in figures.items():
                    off = abs(ratio - 1)
                    checks.append(check(f"{answer['name']}: {name} beside libcachesim", off, "<= 0.01", off <= 0.01))
                continue
            ours, theirs, label = figures["flexd"], figures["libcachesim"], f"{answer['name']}, {share}"
            for ahead in AHEAD:
                ratio = ours[f"ahead {ahead}"] / ours["LRU"]
                checks.append(check(f"{label}: ahead {ahead} / LRU", ratio, "< 1", ratio < 1))
            if share == "0.05":
                ratio = ours["ahead 4"] / theirs.get("Belady", ours["Belady"])
                checks.append(check(f"{label}: ahead 4 / Belady", ratio, "<= 1.25", ratio <= 1.25))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", required=True, metavar="FILE.npz")
    parser.add_argument("--batch", type=int, default=16_384, help="accesses of a batch of all ranks")
    parser.add_argument("--quick", action="store_true", help="5 %% of the rows alone")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--restart", action="store_true", help="misses after a restart, by what is known of the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.restart:
        of_traces = {path.stem: restarted(path, arguments.batch, QUICK_SHARES[0]) for path in arguments.trace}
        return ending(of_traces, [], as_json=arguments.json)
    library = importlib.util.find_spec("libcachesim") is not None
    if not library:
        print("libcachesim is not installed (pip install libcachesim): its columns are missing")
    shares = QUICK_SHARES if arguments.quick else SHARES
    answers = [
        run(path, arguments.batch, shares, 20_000 if arguments.quick else 200_000, library) for path in arguments.trace
    ]
    checks = checks_of(answers)
    return ending(answers, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
