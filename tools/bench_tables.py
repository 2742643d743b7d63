"""Home rule and answer of every table: flexd beside greedy and random placements of whole tables.

    python tools/bench_tables.py --quick
    python tools/bench_tables.py --tables tables.csv [--quick] [--json]

Everything but planning seconds (processor time of this machine) is arithmetic of the cost model (docs/cost-model.md,
"Tables"). Whole tables of the peers answer by sums where they are pooled, over flexd's exchange, so that placements
alone are compared. Without ``--tables`` a made up
list of the same shape is used.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torchrec_peer
import torchrec_planner
from bench_report import check, ending
from planner_problems import made_up_tables, problem_of

from flexd.core.errors import PlanError
from flexd.core.layout import RankLayout
from flexd.planner.baselines.whole_tables import place_greedily
from flexd.planner.model.workload import ACCESSES, STATISTICS
from flexd.planner.tables.chain_costs import OPTIONS, chain_options
from flexd.planner.tables.options import HomeKind, TableOptions
from flexd.planner.tables.rank_loads import Pieces, RankLoads
from flexd.planner.tables.sharding import TableStatistics, listed_seconds, shard_tables
from flexd.planner.tables.solve import EVALUATIONS, TablePlacement, place_tables
from flexd.planner.tables.table_list import ListedTable, read_tables
from flexd.planner.tables.table_work import TableWork
from flexd.topology.files import load_preset

Figures = dict[str, Any]

PRESET = "azure-a100-200g"
RANK_MEMORY_BYTES = 40e9
SKEW = 1.05
LISTED_ROWS = 1000
RANDOM_DRAWS = 5
_ALL_SUMS, _RANK_ROWS, _RANK_SUMS = 1, 4, 5


def work_of(tables: Sequence[ListedTable], layout: RankLayout) -> TableWork:
    profile, keyspace, shape = problem_of(tables, layout.world_size, SKEW, [LISTED_ROWS] * len(tables))
    return TableWork.of(profile, keyspace, layout, shape)


def greedy_costs(work: TableWork) -> dict[str, np.ndarray]:
    """Costs of AutoShard's baselines (arXiv 2208.06399, "Baselines"), by table."""
    dim, lookups = work.wire_bytes / 2, work.statistics[:, ACCESSES]
    return {
        "size": dim * work.rows,
        "dim": dim,
        "lookup": dim * lookups,
        "size_lookup": dim * lookups * np.log10(np.maximum(work.rows, 10.0)),
    }


def whole(work: TableWork, rank: np.ndarray) -> Pieces:
    option = np.where(work.bags > 0, _RANK_SUMS, _RANK_ROWS)
    return Pieces(np.arange(len(rank)), option, rank.astype(np.int64))


def row_of(name: str, options: TableOptions, layout: RankLayout, pieces: Pieces | None, seconds: float) -> Figures:
    if pieces is None:
        return {
            "strategy": name,
            "not_applicable": f"a table finds no rank with room for it ({RANK_MEMORY_BYTES:.3g} B)",
        }
    loads = RankLoads.of(options, layout, np.full(layout.world_size, RANK_MEMORY_BYTES), pieces)
    used = {options.options[o].answer for o in np.unique(pieces.option)}
    fixed = sum(of_answer for answer, of_answer in options.answer_seconds if answer in used)
    flat = loads.total.reshape(len(loads.total), -1)
    of_rank = options.axis_seconds @ flat[:-1]
    between = [
        at for at, phase in enumerate(options.axis_phase)
        if options.phases[phase].endswith("inter_node") and "_ids_" not in options.phases[phase]
    ]  # fmt: skip
    return {
        "strategy": name,
        "milliseconds": (loads.seconds() + fixed) * 1e3,
        "balance": float(of_rank.min() / of_rank.max()),
        "inter_node_megabytes": float(flat[between[::2]].mean(axis=1).sum()) / 1e6,
        "memory_gigabytes": float(flat[-1].max()) / 1e9,
        "fits": bool(loads.over_memory() <= 0),
        "plan_seconds": seconds,
    }


def compare(title: str, tables: Sequence[ListedTable], layout: RankLayout, evaluations: int = EVALUATIONS) -> Figures:
    """Every strategy on these tables; ``evaluations`` of flexd's local searches."""
    work = work_of(tables, layout)
    cluster = load_preset(PRESET).of_layout(layout.nodes, layout.local_ranks)
    options = chain_options(work, layout, cluster)
    world, rng = layout.world_size, np.random.default_rng(0)
    rows: list[Figures] = []

    def add(name: str, make: Any) -> Any:
        started = time.process_time()
        pieces = make()
        rows.append(row_of(name, options, layout, pieces, time.process_time() - started))
        return pieces

    every = np.arange(len(tables))
    zero = np.zeros(len(tables), np.int64)
    add("all, rows", lambda: Pieces(every, zero, zero))
    add("all, better answer", lambda: Pieces(every, better_of(options, layout, work, (0, _ALL_SUMS)), zero))
    draws = [
        row_of("", options, layout, whole(work, rng.integers(0, world, len(tables))), 0.0) for _ in range(RANDOM_DRAWS)
    ]
    rows.append(sorted(draws, key=lambda row: row["milliseconds"])[RANDOM_DRAWS // 2] | {"strategy": "random (median)"})
    for name, cost in greedy_costs(work).items():

        def greedy(cost: np.ndarray = cost) -> Pieces | None:
            rank = place_greedily(cost, work.stored_bytes, world, RANK_MEMORY_BYTES)
            return None if rank is None else whole(work, rank)

        add(f"{name} greedy", greedy)
    whole_only = tuple(o for o in OPTIONS if o.rule is HomeKind.RANK)
    started = time.process_time()
    try:
        alone = place_tables(
            chain_options(work, layout, cluster, options=whole_only), layout, RANK_MEMORY_BYTES, evaluations=evaluations
        )
        renamed = Pieces(alone.pieces.table, alone.pieces.option + _RANK_ROWS, alone.pieces.place)
        rows.append(row_of("flexd, whole tables only", options, layout, renamed, time.process_time() - started))
        rows[-1]["gap"] = alone.gap
    except PlanError as error:
        rows.append({"strategy": "flexd, whole tables only", "not_applicable": str(error)})
    started = time.process_time()
    placed: TablePlacement = place_tables(options, layout, RANK_MEMORY_BYTES, evaluations=evaluations)
    rows.append(row_of("flexd", options, layout, placed.pieces, time.process_time() - started))
    rows[-1] |= {"gap": placed.gap, "bound_milliseconds": placed.bound_seconds * 1e3}
    chosen = np.bincount(placed.option_of_tables(), minlength=len(OPTIONS))
    return {
        "name": title, "tables": len(tables), "ranks": world, "strategies": rows,
        "chosen": {option.name: int(count) for option, count in zip(OPTIONS, chosen, strict=True)},
    }  # fmt: skip


def compare_in_torchrec(title: str, tables: Sequence[ListedTable], layout: RankLayout) -> Figures:
    """Plans for TorchRec's exchange: all row-wise, its own planner's (if installed) and that of ``flexd shard``."""
    cluster, statistics = load_preset(PRESET), TableStatistics(SKEW, dtype="float16")
    started = time.process_time()
    mine = shard_tables(tables, layout, cluster, RANK_MEMORY_BYTES, statistics)
    seconds = time.process_time() - started
    rows = [
        {"strategy": "row-wise", "milliseconds": mine.placement.spread_seconds * 1e3, "plan_seconds": 0.0},
        {"strategy": "flexd shard", "milliseconds": mine.placement.seconds * 1e3, "plan_seconds": seconds},
    ]
    if torchrec_peer.missing() is None:
        own, seconds = torchrec_planner.planned(tables, layout, RANK_MEMORY_BYTES)
        priced = listed_seconds(own, layout, cluster, statistics)
        assert priced is not None
        rows.append({"strategy": "TorchRec's planner", "milliseconds": priced * 1e3, "plan_seconds": seconds})
    return {"name": title, "tables": len(tables), "ranks": layout.world_size, "strategies": rows}


def better_of(options: TableOptions, layout: RankLayout, work: TableWork, of: tuple[int, int]) -> np.ndarray:
    """Of two options that load all ranks alike the one of less time, by table."""
    seconds = options.mean(options.loads, layout) @ options.axis_seconds
    seconds = np.where(options.allowed, seconds, np.inf)
    return np.where(seconds[:, of[1]] < seconds[:, of[0]], of[1], of[0]).astype(np.int64)


def large(tables: int, nodes: int) -> Figures:
    """Pooled tables of 10^6 rows in the mean, log-normal; planning alone."""
    rng, layout = np.random.default_rng(0), RankLayout(nodes, 8)
    size = np.exp(rng.normal(11, 2.5, tables))
    size *= 1e6 * tables / size.sum()
    looked_up = 2560 * np.exp(rng.normal(1.5, 1.2, tables)).clip(1, 200)
    statistics = np.zeros((tables, STATISTICS))
    statistics[:, 0], statistics[:, ACCESSES] = size, looked_up
    for columns, ranks in (((2, 8), 1), ((3, 9), 8), ((4,), nodes * 8)):
        statistics[:, list(columns)] = (np.minimum(size, looked_up * ranks) ** 0.9)[:, None]
    dim = rng.choice([8, 16, 32, 64, 128], tables).astype(float)
    names = tuple(f"t{i}" for i in range(tables))
    bags, one = np.full(tables, 2560.0), np.ones(tables)
    work = TableWork(names, statistics, bags, 2 * dim, 2 * dim, 4 * one, size, one, 8)
    options = chain_options(work, layout, load_preset(PRESET).of_layout(nodes, 8))
    started = time.process_time()
    placed = place_tables(options, layout, RANK_MEMORY_BYTES)
    return {
        "tables": tables, "ranks": layout.world_size, "rows": float(size.sum()), "gap": placed.gap,
        "plan_seconds": time.process_time() - started, "over_spread": placed.seconds / placed.spread_seconds,
    }  # fmt: skip


def show(figures: Figures) -> None:
    for case in figures["cases"]:
        print(f"\n{case['name']}: {case['tables']} tables on {case['ranks']} ranks, Zipf {SKEW}, {PRESET}")
        print(f"  {'strategy':28}{'ms, busiest':>12}{'balance':>9}{'MB between':>12}{'GB':>8}{'plan s':>9}{'gap':>8}")
        for row in case["strategies"]:
            if "not_applicable" in row:
                print(f"  {row['strategy']:28}{row['not_applicable']}")
                continue
            end = (f"{row['gap']:8.1%}" if "gap" in row else "") + ("" if row["fits"] else "  over memory")
            print(
                f"  {row['strategy']:28}{row['milliseconds']:12.2f}{row['balance']:9.2f}"
                f"{row['inter_node_megabytes']:12,.0f}{row['memory_gigabytes']:8.1f}{row['plan_seconds']:9.2f}{end}"
            )
        print("  flexd chose " + ", ".join(f"{count} {name}" for name, count in case["chosen"].items() if count))
    for case in figures["torchrec"]:
        print(f"\n{case['name']}, in TorchRec's exchange: {case['tables']} tables on {case['ranks']} ranks")
        for row in case["strategies"]:
            print(f"  {row['strategy']:28}{row['milliseconds']:12.2f} ms{row['plan_seconds']:9.2f} s to plan")
    for one in figures["large"]:
        print(
            f"\n{one['tables']:,} tables, {one['rows']:.2g} rows, {one['ranks']:,} ranks: planned in "
            f"{one['plan_seconds']:.1f} s of processor, {one['over_spread']:.2f} of spread rows, gap {one['gap']:.1%}"
        )
    print(f"peak memory of this process {figures['peak_gibibytes']:.2f} GiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, metavar="CSV", help="a list as TorchRec's published example")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    listed = read_tables(options.tables) if options.tables else made_up_tables()
    pooled = [table for table in listed if table.bags > 0]
    rng = np.random.default_rng(0)
    cases: list[Figures] = []
    in_torchrec: list[Figures] = []
    for count, layout in ((50, RankLayout(1, 4)), (100, RankLayout(1, 8)), (200, RankLayout(2, 8))):
        drawn = [replace(pooled[at]) for at in np.sort(rng.choice(len(pooled), count, replace=False)).tolist()]
        cases.append(compare(f"{count} pooled tables, drawn", drawn, layout))
        if not (options.quick and in_torchrec):
            in_torchrec.append(compare_in_torchrec(f"{count} pooled tables, drawn", drawn, layout))
    if not options.quick or options.tables:
        cases.append(compare("the pooled tables of the list", pooled, RankLayout(12, 8)))
        cases.append(compare("the whole list", listed, RankLayout(12, 8)))
    scale = [(500, 8)] if options.quick else [(2500, 128), (5000, 128), (10_000, 128)]
    figures = {
        "cases": cases,
        "torchrec": in_torchrec,
        "large": [large(*one) for one in scale],
        "peak_gibibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    show(figures)
    return ending(figures, checks(figures, quick=options.quick), as_json=options.json)


def checks(figures: Figures, *, quick: bool) -> list[Figures]:
    result = []
    for case in figures["cases"]:
        named = {row["strategy"]: row for row in case["strategies"] if row.get("fits")}
        mine = named.pop("flexd")["milliseconds"]
        named.pop("flexd, whole tables only", None)
        ratio = mine / min(row["milliseconds"] for row in named.values())
        result.append(check(f"{case['name']}: flexd over the best peer", ratio, "<= 1", ratio <= 1))
    for case in figures["torchrec"]:
        priced = {row["strategy"]: row["milliseconds"] for row in case["strategies"]}
        ratio = priced.pop("flexd shard") / min(priced.values())
        result.append(check(f"{case['name']}: flexd shard over the best peer", ratio, "<= 1", ratio <= 1))
    peak, largest = figures["peak_gibibytes"], figures["large"][-1]
    result.append(check("peak memory, GiB", peak, "< 4", peak < 4))
    if not quick:
        first = figures["large"][0]
        growth = largest["plan_seconds"] / first["plan_seconds"]
        most = 1.2 * largest["tables"] * np.log(largest["tables"]) / (first["tables"] * np.log(first["tables"]))
        whole_list = figures["cases"][-1]["strategies"][-1]["plan_seconds"]
        result += [
            check("the whole list: seconds of processor", whole_list, "<= 10", whole_list <= 10),
            check(
                "10,000 tables: seconds of processor", largest["plan_seconds"], "<= 30", largest["plan_seconds"] <= 30
            ),
            check("seconds, most tables over fewest", growth, "n log n", growth <= most),
        ]
    return result


if __name__ == "__main__":
    sys.exit(main())
