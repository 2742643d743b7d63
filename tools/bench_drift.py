#!/usr/bin/env python3
"""Drift as regret, beside the price of the live placement over its price when it was planned.

    PYTHONPATH=.:tools python tools/bench_drift.py [--quick] [--json]

One table of 4,000 rows x 64 on 2 x 2 ranks with 20 replica slots each, Zipf 1.2, counted by the daemon's sketches with
a half-life of 5 s; prices of a scale model of a common cluster. A plan is made and becomes the live placement, then the
accesses change for a minute:

  steady     not at all
  replaced   the whole hot set is another one
  flatter    the same order of rows, Zipf 0.9

A plan is worth making for the second alone.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from bench_report import check, last_line

from flexd.config.planner import PlannerConfig
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.planner.drift import Drift, PlacementCommunication, placement_communication
from flexd.planner.plan import make_plan
from flexd.sketch.profile import Profile
from flexd.sketch.sketch_set import SketchSet
from flexd.topology.files import load_preset
from flexd.topology.scale import scale_model

LAYOUT = RankLayout(2, 2)
KEYSPACE = KeySpace([TableSpec("item", 4_000, 64)])
CLUSTER = scale_model(load_preset("azure-a100-200g"), 1e6)
SLOTS, ACCESSES_PER_STEP, ACCESSES_PER_SECOND = 20, 40_000.0, 20_000
CHANGES = {"steady": (0, 1.2), "replaced": (2_000, 1.2), "flatter": (0, 0.9)}
"""Ranks of popularity by which the rows move, and the exponent."""


def see(sketches: SketchSet, seconds: range, moved: int, exponent: float) -> None:
    """Count accesses of these seconds."""
    rows = KEYSPACE.total_rows
    weights = np.arange(1, rows + 1) ** -exponent
    order = np.random.default_rng(99).permutation(rows)
    for second in seconds:
        drawn = np.random.default_rng(second).choice(rows, ACCESSES_PER_SECOND, p=weights / weights.sum())
        sketches.ingest("item", order[(drawn + moved) % rows], 0, float(second))


def plan(profile: Profile, live: Placement) -> Placement:
    return make_plan(
        profile, KEYSPACE, LAYOUT, CLUSTER, [SLOTS], live, plan_id="bench", parent_id="", topology_generation=1,
        horizon_steps=1e9, now_unix_seconds=0.0, reason="bench",
    ).target  # fmt: skip


def price(profile: Profile, placement: Placement) -> PlacementCommunication:
    return placement_communication(profile, KEYSPACE, LAYOUT, CLUSTER, placement)


def measure(moved: int, exponent: float, seconds: int) -> dict[str, float]:
    sketches = SketchSet(KEYSPACE.tables, half_life_seconds=5.0)
    see(sketches, range(1, 31), 0, 1.2)
    before = sketches.profile(ACCESSES_PER_STEP)
    live = plan(before, Placement.empty())
    see(sketches, range(31, 31 + seconds), moved, exponent)
    now = sketches.profile(ACCESSES_PER_STEP)
    price_now = price(now, live)
    return {
        "rows_with_copies": float(len(live)),
        "regret": Drift(price(now, plan(now, live)), price_now).ratio,
        "now_over_when_planned": price_now.total.exposed_seconds / price(before, live).total.exposed_seconds,
    }


def checks_of(found: dict[str, dict[str, float]], threshold: float) -> list[dict[str, Any]]:
    """Regret is above the threshold where the hot set was replaced, and of a plan that copies rows."""
    checks = []
    for name, row in found.items():
        above = name == "replaced"
        right = row["rows_with_copies"] > 0 and (row["regret"] > threshold) == above
        checks.append(check(f"{name}: regret", row["regret"], f"{'>' if above else '<='} {threshold}", right))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half a minute of changed accesses")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    seconds = 30 if arguments.quick else 60
    found = {name: measure(*change, seconds) for name, change in CHANGES.items()}
    threshold = PlannerConfig().drift_threshold
    assert threshold is not None
    print(f"{'accesses':<12}{'copies':>8}{'regret':>10}{'price now / when planned':>28}")
    for name, row in found.items():
        print(f"{name:<12}{row['rows_with_copies']:>8.0f}{row['regret']:>10.4f}{row['now_over_when_planned']:>28.4f}")
    checks = checks_of(found, threshold)
    for entry in checks:
        print(f"{'ok  ' if entry['ok'] else 'MISS'} {entry['name']}: {entry['value']:.4f} (target {entry['target']})")
    if arguments.json:
        print(last_line(found, checks))
    return 0 if all(entry["ok"] for entry in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
