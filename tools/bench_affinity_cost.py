"""What affinity costs: processor time and memory of the co-access sample and of learning homes.

    python tools/bench_affinity_cost.py [--trace ask_ubuntu.npz] [--trace online_retail.npz] [--step-ms 100] [--json]

In one process, processor time alone. ``sample``: a training sample offered to a co-access sample that is full, and to
one that is still filling; its memory is what the configuration says. ``learn``: one plan from all held samples, with
homes from before; the most memory that it takes beside the sample, and its share of one core with the default
``planner.interval_seconds``. Both are the daemon's. Samples as
in ``bench_affinity``.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_affinity import LOCAL_RANKS, planted, trace_samples
from bench_coaccess import HORIZON, keyspace, offer
from bench_report import check, ending

from flexd.config.planner import PlannerConfig
from flexd.core.layout import RankLayout
from flexd.planner.affinity.sample_rows import SampleRows
from flexd.planner.affinity.sampled_window import sampled_window
from flexd.planner.affinity.streaming import plan_affinity
from flexd.sketch.coaccess import CoAccessSample
from flexd.sketch.coaccess_kernels import warm_up

PER_RANK = 64
SAMPLE_BYTES = 1 << 20
SHARE = 0.02
_SECONDS = 1.0
"""Of repeating a short measurement."""


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that the work takes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the mean processor seconds of the work, repeated for a second."""
    begin, times = time.process_time(), 0
    while not times or time.process_time() - begin < _SECONDS:
        work()
        times += 1
    return (time.process_time() - begin) / times


def sample_figures(samples: SampleRows) -> tuple[CoAccessSample, dict[str, float]]:
    """Return a full co-access sample, and its costs; all samples are offered in batches."""
    sample = CoAccessSample([int(samples.keys.max()) + 1], SAMPLE_BYTES, None)
    costs: dict[bool, list[float]] = {True: [], False: []}
    step = 512
    for number, first in enumerate(range(0, len(samples) - step, step)):
        full = np.isfinite(sample.limit)
        costs[bool(full)].append(offer(sample, samples, np.arange(first, first + step), float(number)) / step)
    filling, full_us = (1e6 * float(np.median(costs[full])) if costs[full] else np.nan for full in (False, True))
    return sample, {"filling_us": filling, "full_us": full_us, "bytes": float(sample.nbytes)}


def learn_figures(sample: CoAccessSample, layout: RankLayout, rows: int) -> dict[str, float]:
    """Return the costs of a plan that goes on from one before."""
    keys, size = keyspace(rows), layout.world_size * PER_RANK
    read = sample.read(["rows"])
    window = sampled_window(read, keys, horizon_steps=HORIZON, batch_samples=size)
    before = plan_affinity(window, layout)

    def work() -> None:
        again = sampled_window(sample.read(["rows"]), keys, horizon_steps=HORIZON, batch_samples=size)
        plan_affinity(again, layout, before, in_place=True)

    seconds = seconds_of(work)
    interval = PlannerConfig().interval_seconds or np.nan
    return {
        "samples": float(read.samples), "us_a_sample": 1e6 * seconds / read.samples, "seconds": seconds,
        "peak_bytes": float(peak_bytes(work)), "share_of_a_core": seconds / interval,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE.npz")
    parser.add_argument("--step-ms", type=float, default=100.0, help="of one core, to compare the sample with")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warm_up()
    made = {path.stem: trace_samples(path) for path in options.trace} | {"planted": planted(30_000)[0]}
    figures: dict[str, Any] = {}
    checks = []
    for name, samples in made.items():
        sample, offered = sample_figures(samples)
        figures[f"{name}, sample"] = offered
        checks.append(
            check(f"{name}: sample, share of a step", offered["full_us"] * PER_RANK / options.step_ms / 1e3,
                  "<= 0.02", offered["full_us"] * PER_RANK / options.step_ms / 1e3 <= SHARE)
        )  # fmt: skip
        print(
            f"{name}: a sample of {samples.lengths.mean():.1f} rows offered: {offered['filling_us']:.2f} us while the "
            f"sample fills, {offered['full_us']:.2f} us when it is full; {offered['bytes']:,.0f} B",
            flush=True,
        )
        for nodes in (2, 8):
            layout, at = RankLayout(nodes, LOCAL_RANKS), f"{name}, {nodes} nodes"
            learn = figures[f"{at}, learn"] = learn_figures(sample, layout, int(samples.keys.max()) + 1)
            checks.append(
                check(f"{at}: learning, share of a core", learn["share_of_a_core"], "<= 0.02",
                      learn["share_of_a_core"] <= SHARE)
            )  # fmt: skip
            print(
                f"{at}: learn {learn['us_a_sample']:.1f} us a sample ({learn['seconds']:.2f} s, "
                f"{learn['samples']:,.0f} samples), at most {learn['peak_bytes']:,.0f} B, "
                f"{learn['share_of_a_core']:.2%} of one core",
                flush=True,
            )
    return ending(figures, checks, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
