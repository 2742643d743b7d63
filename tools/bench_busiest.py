"""The busiest rank of every phase: what levelling it wins over the best plan of the mean, and what is proven of both.

    python tools/bench_busiest.py [--quick] [--json]

One table of Zipf popularity, replica slots for 1 % of the listed rows. Homes are even (keys at random), or skewed:
every second one of the hottest 5 % of the rows is at home on the first rank of its node. All figures but the seconds
are arithmetic of the cost model, the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from typing import Any

import numpy as np
from bench_report import check, ending

from flexd.core.layout import RankLayout
from flexd.planner.model.workload import GroupLoad
from flexd.planner.solver.tiers import choose_tiers
from flexd.topology.files import load_preset

PRESETS = ("azure-a100-200g", "h100-400g")
LAYOUTS = (RankLayout(4, 8), RankLayout(12, 8))
SKEWS = (0.9, 1.2)
ROW_BYTES = 256
LOOK_UPS_A_ROW = 2.0
"""Of one rank and step, in the mean over the listed rows."""


def problem(rows: int, skew: float, layout: RankLayout, *, skewed: bool) -> GroupLoad:
    keys = np.random.default_rng(1).permutation(rows * 4)[:rows].astype(np.int64)
    if skewed:
        hot = np.arange(0, rows // 20, 2)
        keys[hot] -= keys[hot] % layout.local_ranks
    share = np.arange(1, rows + 1, dtype=np.float64) ** -skew
    keys, first = np.unique(keys, return_index=True)
    accesses = (LOOK_UPS_A_ROW * rows * share / share.sum())[first]
    empty = np.empty(0)
    return GroupLoad(0, ROW_BYTES, 0, keys, accesses, accesses, accesses, empty, empty)


def compared(rows: int, preset: str, layout: RankLayout, skew: float, *, skewed: bool, latency: bool) -> dict[str, Any]:
    load = problem(rows, skew, layout, skewed=skewed)
    cluster = load_preset(preset) if latency else load_preset(preset).bandwidth_only()
    live, seconds, choices = np.zeros(len(load.keys), np.uint8), [], []
    for level in (False, True):
        started = time.perf_counter()
        choices.append(choose_tiers(load, layout, cluster, rows // 100, live, 1e4, level=level))
        seconds.append(time.perf_counter() - started)
    mean, levelled = (choice.busiest for choice in choices)
    return {
        "title": f"{preset} {layout.nodes}x{layout.local_ranks} Zipf {skew} {'skewed' if skewed else 'even'} homes "
        f"{'with' if latency else 'without'} latencies",
        "latency": latency,
        "skewed": skewed,
        "copies": int(np.count_nonzero(choices[1].tiers)),
        "imbalance": choices[0].cost.imbalance,
        "won_share": 1 - levelled.objective_seconds / mean.objective_seconds,
        "mean_gap": mean.gap,
        "levelled_gap": levelled.gap,
        "left_share_of_price": 1 - levelled.lower_bound_seconds / levelled.objective_seconds,
        "seconds": seconds[0],
        "levelled_seconds": seconds[1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 rows instead of 20,000: under a minute")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    rows = 5_000 if arguments.quick else 20_000
    cases = []
    for latency, layout, preset, skew, skewed in product((True, False), LAYOUTS, PRESETS, SKEWS, (False, True)):
        cases.append(compared(rows, preset, layout, skew, skewed=skewed, latency=latency))
        case = cases[-1]
        print(
            f"{case['title']:68} imbalance {case['imbalance']:.3f}, levelling wins {case['won_share']:7.3%} "
            f"of the price; of the saving {case['mean_gap']:6.2%} may be left, levelled {case['levelled_gap']:6.2%} "
            f"({case['left_share_of_price']:.2%} of the price); {case['seconds']:.2f}, {case['levelled_seconds']:.2f} s"
        )
    fast = [case for case in cases if not case["latency"]]
    slow = [case for case in cases if case["latency"]]
    figures = {
        "cases": cases,
        "best_win_without_latencies": max(case["won_share"] for case in fast),
        "best_win_with_latencies": max(case["won_share"] for case in slow),
        "worst_gap_without_latencies": max(case["levelled_gap"] for case in fast),
        "worst_gap_with_latencies": max(case["levelled_gap"] for case in slow),
    }
    worst = min(case["won_share"] for case in cases)
    checks = [
        check("levelling never costs: smallest win", worst, ">= 0", worst >= -1e-12),
        check(
            "without latencies, skewed homes: best win", figures["best_win_without_latencies"], "> 0.05",
            figures["best_win_without_latencies"] > 0.05,
        ),
        check(
            "with latencies: largest share of the saving that is left", figures["worst_gap_with_latencies"], "< 0.001",
            figures["worst_gap_with_latencies"] < 1e-3,
        ),
    ]  # fmt: skip
    print(
        f"best win without latencies {figures['best_win_without_latencies']:.2%}, "
        f"with {figures['best_win_with_latencies']:.2%}; "
        f"largest gap {figures['worst_gap_without_latencies']:.1%} and {figures['worst_gap_with_latencies']:.1%}"
    )
    return ending(figures, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
