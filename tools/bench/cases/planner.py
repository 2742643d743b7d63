"""The planner at production size.

Time, memory, optimality, and other strategies priced by the same model. Times are of this machine, all
else is arithmetic of the cost model (docs/cost-model.md). Without ``--tables`` a made up list of the same shape is
used. A check of a plan's time, memory or gap fails if any plan that it is about copies no row: an empty plan is quick,
small and as good as the two-hop chain.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement, RankLayout
from flexd.planner.model.cost import CostBreakdown
from flexd.planner.model.prices import TrafficPhase
from flexd.planner.model.workload import TrainingShape
from flexd.planner.plan import Plan, PlanOrigin, make_plan
from flexd.planner.tables.sharding import ListedTable, read_tables
from flexd.sketch.profile import Profile
from flexd.topology.cluster import INTER, INTRA
from flexd.topology.files import load_preset
from tools.bench.harness import Outcome, check, peak_resident_bytes, reset_peak
from tools.bench.planning import made_up_tables, problem_of

LAYOUT = RankLayout(12, 8)
REPLICA_SHARE = 0.01
SEQUENCE_ROWS_LISTED = 500_000
SKEWS = (0.9, 1.05, 1.2)
MICRO_BATCHES = 4

Figures = dict[str, Any]


def plan_of(
    profile: Profile, keyspace: KeySpace, layout: RankLayout, preset: str, shape: TrainingShape
) -> tuple[Plan, float]:
    """Return (plan, seconds it took)."""
    slots = [int(REPLICA_SHARE * group.rows) for group in keyspace.groups]
    started = time.perf_counter()
    plan = make_plan(
        profile, keyspace, layout, load_preset(preset), slots, Placement.empty(),
        PlanOrigin("bench", "", 1, "benchmark", 0.0), horizon_steps=1e4, shape=shape,
    )  # fmt: skip
    return plan, time.perf_counter() - started


def row_of(name: str, cost: CostBreakdown) -> Figures:
    return {
        "strategy": name,
        "milliseconds": cost.exposed_seconds * 1e3,
        "inter_node_all_to_all_megabytes": cost.all_to_all_bytes(INTER) / 1e6,
        "inter_node_sync_megabytes": cost.sync_bytes(INTER) / 1e6,
        "intra_node_megabytes": float(cost.bytes[..., INTRA].sum()) / 1e6,
    }


def strategies(tables: list[ListedTable], preset: str, skew: float) -> Figures:
    """Strategies that divide tables by row, and flexd, on the sequence tables at one skew."""
    sequence = [table for table in tables if table.bags == 0]
    profile, keyspace = problem_of(sequence, LAYOUT.world_size, skew, [SEQUENCE_ROWS_LISTED] * len(sequence))
    plan, seconds = plan_of(profile, keyspace, LAYOUT, preset, TrainingShape())
    rows = [row_of(name, cost) for name, cost in (*plan.costs.baselines.items(), ("flexd", plan.costs.after))]
    # Exact synchronous training with fixed homes moves no fewer row bytes between nodes than the chain does.
    chain = plan.costs.baselines["two_hop"].bytes[:, [TrafficPhase.FORWARD_ROWS, TrafficPhase.BACKWARD_ROWS], INTER]
    return {
        "skew": skew,
        "plan_seconds": seconds,
        "gap": plan.optimum.gap,
        "rows": {"NODE": plan.costs.after.rows[1], "DEVICE": plan.costs.after.rows[2]},
        "volume_bound_megabytes": float(chain.sum()) / 1e6,
        "strategies": rows,
    }


def whole_list(tables: list[ListedTable], preset: str) -> Figures:
    """The plan of every table of the list."""
    listed = [SEQUENCE_ROWS_LISTED if table.bags == 0 else 200 for table in tables]
    profile, keyspace = problem_of(tables, LAYOUT.world_size, 1.05, listed)
    plan, seconds = plan_of(profile, keyspace, LAYOUT, preset, TrainingShape())
    return {
        "tables": len(tables),
        "dim_groups": len(keyspace.groups),
        "listed_rows": sum(len(table.hot_rows) for table in profile.tables),
        "rows_above_home": len(plan.target),
        "plan_seconds": seconds,
        "gap": plan.optimum.gap,
    }


def many_tables(preset: str, counts: Sequence[int]) -> list[Figures]:
    """10^9 rows in the largest number of tables, on 128 ranks; before, the same tables, fewer of them.

    A step has MICRO_BATCHES passes: with one, plans of 107, 214 and 428 tables copy no row.
    """
    result = []
    for count in counts:
        tables = [ListedTable(f"t{i}", 10**9 // counts[-1], (64, 128)[i % 2], 50.0, 0.0, 512) for i in range(count)]
        layout = RankLayout(16, 8)
        profile, keyspace = problem_of(tables, layout.world_size, 1.05, [1000] * count)
        shape = TrainingShape(micro_batches=MICRO_BATCHES)
        plan, seconds = plan_of(profile, keyspace, layout, preset, shape)
        result.append(
            {"tables": count, "plan_seconds": seconds, "gap": plan.optimum.gap, "rows_above_home": len(plan.target)}
        )
    return result


def checks_of(figures: Figures) -> list[Figures]:
    by_skew: list[Figures] = figures["strategies"]
    most_listed = figures["whole_list"]
    plans = [*by_skew, most_listed]
    ahead = []
    for skew in by_skew:
        named = {row["strategy"]: row for row in skew["strategies"]}
        others = [row["milliseconds"] for name, row in named.items() if name != "flexd"]
        ahead.append(named["flexd"]["milliseconds"] / min(others))
    copies = min(sum(skew["rows"].values()) for skew in by_skew)
    many = figures["many_tables"]
    largest, peak = many[-1]["plan_seconds"], figures["peak_gibibytes"]
    per_table = [entry["plan_seconds"] / entry["tables"] for entry in many]

    slowest, gap = max(p["plan_seconds"] for p in plans), max(p["gap"] for p in [*plans, *many])
    by_skew_copy, list_copies = copies > 0, most_listed["rows_above_home"] > 0
    many_copy = all(entry["rows_above_home"] > 0 for entry in many)
    all_copy = by_skew_copy and list_copies and many_copy
    return [
        check("plan seconds, worst", slowest, "< 5", all_copy and slowest < 5),
        check("peak memory of this process, GiB", peak, "< 2", all_copy and peak < 2),
        check("rows with copies, fewest", copies, "> 0", by_skew_copy),
        check("gap to the lower bound as a share of the saving, worst", gap, "< 0.001", all_copy and gap < 1e-3),
        check("flexd over the best other strategy, time", max(ahead), "< 1", by_skew_copy and max(ahead) < 1),
        check("10^9 rows: plan seconds", largest, "< 10", many_copy and largest < 10),
        check(
            "10^9 rows: seconds per table, most tables over fewest", per_table[-1] / per_table[0], "< 1.5",
            many_copy and per_table[-1] < 1.5 * per_table[0],
        ),
    ]  # fmt: skip


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--tables", type=Path, help="CSV as in TorchRec's published sharding example")
    parser.add_argument("--preset", default="azure-a100-200g", help="topology preset that prices everything")


def production(options: Namespace) -> Outcome:
    tables = read_tables(options.tables) if options.tables else made_up_tables()
    reset_peak()
    figures: Figures = {
        "strategies": [strategies(tables, options.preset, skew) for skew in ((1.05,) if options.quick else SKEWS)],
        "whole_list": whole_list(tables, options.preset),
        "many_tables": many_tables(options.preset, (107, 856) if options.quick else (107, 214, 428, 856)),
    }
    figures["peak_gibibytes"] = peak_resident_bytes() / 2**30
    return Outcome(figures, checks_of(figures))


SECTIONS = {"production": production}
