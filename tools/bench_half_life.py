#!/usr/bin/env python3
"""How long counts of frames should remember: chosen live, beside constants that were chosen on other accesses.

    python tools/bench_half_life.py --trace FILE.npz [--trace ...] [--batch 2048] [--zipf 0.9 1.05 1.2] [--json]

Accesses are cut into halves. Misses a distinct row of the second half (its last three quarters; frames are empty at
first, and hold 5 % of the rows, one batch at least) with each half-life as a constant, with the constant that misses
least in the first half of the same accesses, with the one that misses least in the first halves of all others, and with
the half-life that flexd chooses live. So nothing is judged by what it was chosen on.

Checks: live fewer misses than LRU, and at most 1.03 of the constant chosen on the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_frames import Int64Array, Steps, keys_of, missed_by_frames
from bench_memory_job import batches
from bench_report import check, ending

from flexd.embedding.store.slow.half_life import HALF_LIVES
from flexd.stream.trace import load_trace

SHARE = 0.05
AHEAD = (0, 4)
ZIPF_ROWS, ZIPF_IDS = 252_000, 2_560

Misses = dict[str, float]


def counted(keys: Int64Array, batch: int, ahead: int, *, all_ways: bool) -> Misses:
    """Return misses of each half-life, and with ``all_ways`` of "live", "LRU" and "Belady"."""
    steps = Steps.of(keys, batch)
    frames = max(int(np.diff(steps.starts).max()) + 1, int(steps.distinct * SHARE))
    found = {f"{half_life:g}": missed_by_frames(steps, frames, half_life, ahead)[0] for half_life in HALF_LIVES}
    if all_ways:
        found["live"] = missed_by_frames(steps, frames, None, ahead)[0]
        found["LRU"] = missed_by_frames(steps, frames, 0.0, 0)[0]
        found["Belady"] = missed_by_frames(steps, frames, 1.0, len(steps) + 1)[0]
    return found


def chosen(first_halves: Sequence[Misses]) -> str:
    """Return the half-life with the fewest misses in these, each relative to its own least."""
    return min(
        (f"{half_life:g}" for half_life in HALF_LIVES),
        key=lambda name: sum(misses[name] / max(min(misses.values()), 1e-12) for misses in first_halves),
    )


def judged(firsts: Mapping[str, Misses], seconds: Mapping[str, Misses]) -> dict[str, Misses]:
    """Return for each name the misses of its second half, with the constants that were chosen on first halves."""
    answer = {}
    for name, misses in seconds.items():
        others = [first for other, first in firsts.items() if other != name] or [firsts[name]]
        answer[name] = misses | {
            "chosen on its first half": misses[chosen([firsts[name]])], "chosen on the others": misses[chosen(others)]
        }  # fmt: skip
    return answer


def sources(given: argparse.Namespace) -> dict[str, Int64Array]:
    found = {path.stem: keys_of(load_trace(path)) for path in given.trace}
    for zipf in given.zipf:
        drawn = batches(ZIPF_ROWS, ZIPF_IDS, zipf, seed=5)
        found[f"Zipf {zipf:g}"] = np.concatenate([next(drawn).numpy() for _ in range(2 * given.steps)])
    return found


def checks_of(answer: Mapping[str, Misses]) -> list[dict[str, Any]]:
    checks = []
    for name, misses in answer.items():
        ratio = misses["live"] / max(misses["LRU"], 1e-12)
        checks.append(check(f"{name}: live / LRU", ratio, "< 1", ratio < 1))
        ratio = misses["live"] / max(misses["chosen on the others"], 1e-12)
        checks.append(check(f"{name}: live / constant chosen on the others", ratio, "<= 1.03", ratio <= 1.03))
    return checks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE.npz")
    parser.add_argument("--batch", type=int, default=2_048, help="accesses of a batch of a trace")
    parser.add_argument("--zipf", type=float, nargs="*", default=[1.05], help="exponents of drawn accesses")
    parser.add_argument("--steps", type=int, default=400, help="of each half of drawn accesses")
    parser.add_argument("--ahead", type=int, nargs="+", default=list(AHEAD), help="batches known")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keys, answer = sources(given), dict[str, Misses]()
    for ahead in given.ahead:
        firsts, seconds = {}, {}
        for name, accesses in keys.items():
            batch, half = ZIPF_IDS if name.startswith("Zipf") else given.batch, len(accesses) // 2
            label = f"{name}, {ahead} ahead"
            firsts[label] = counted(accesses[:half], batch, ahead, all_ways=False)
            seconds[label] = counted(accesses[half:], batch, ahead, all_ways=True)
        for label, misses in judged(firsts, seconds).items():
            answer[label] = misses
            print(f"{label}: " + "  ".join(f"{way} {value:.4f}" for way, value in misses.items()), flush=True)
    return ending(answer, checks_of(answer), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
