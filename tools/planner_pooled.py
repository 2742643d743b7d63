"""Pooled tables: the strategies that place whole tables, where capacity binds, beside flexd's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bench_report import check
from planner_problems import problem_of

from flexd.core.layout import RankLayout
from flexd.planner.baselines import ROW_WISE, TWO_HOP, Baseline, BaselineResult, PlanningProblem
from flexd.planner.baselines.all_baselines import HOST_BASELINES, TABLE_BASELINES
from flexd.planner.baselines.two_memories import TwoMemories
from flexd.planner.model.row_bytes import TrafficLink
from flexd.planner.model.workload import ANYWHERE
from flexd.planner.tables.table_list import ListedTable
from flexd.topology.files import load_preset

Figures = dict[str, Any]

LAYOUT = RankLayout(2, 8)
"""RecShard's experiments have 16 GPUs (arXiv 2201.10095), AutoShard's up to 8."""
TABLES, ROWS_LISTED = 400, 1000
ROOM = 1.1
"""Memory of a rank over a rank's share of the tables, where they fit in fast memory."""
FAST_SHARE = 0.25
"""Of the tables, where they do not."""
ROWS_IN_TWO_MEMORIES = "flexd_two_memories"


def pooled_tables(tables: Sequence[ListedTable], preset: str, skew: float) -> list[Figures]:
    """All strategies for pooled tables: within little more than the tables take, and with a quarter in fast memory."""
    pooled = [table for table in tables if table.bags > 0][:TABLES]
    profile, keyspace, shape = problem_of(pooled, LAYOUT.world_size, skew, [ROWS_LISTED] * len(pooled))
    sizes = np.array([float(t.rows) * (t.row_bytes + t.state_bytes) for t in keyspace.tables])
    share = float(sizes.sum()) / LAYOUT.world_size
    problems: list[tuple[str, float, tuple[Baseline, ...]]] = [
        ("all in fast memory", max(ROOM * share, float(sizes.max())), (ROW_WISE, TWO_HOP, *TABLE_BASELINES)),
        ("a quarter in fast memory", FAST_SHARE * share, HOST_BASELINES),
    ]
    result = []
    for name, memory, peers in problems:
        slots = (0,) * len(keyspace.groups)
        case = PlanningProblem(profile, keyspace, LAYOUT, load_preset(preset), memory, slots, shape)
        rows = [figures_of(peer.evaluate(case)) for peer in peers]
        if peers is HOST_BASELINES:
            rows.append(figures_of(hottest_rows_in_fast_memory(case)))
        result.append(
            {
                "problem": name, "skew": skew, "tables": len(pooled), "ranks": LAYOUT.world_size,
                "fast_gigabytes": memory / 1e9, "share_gigabytes": share / 1e9, "strategies": rows,
            }
        )  # fmt: skip
    return result


def figures_of(result: BaselineResult) -> Figures:
    if result.cost is None:
        return {"strategy": result.name, "not_applicable": result.not_applicable}
    figures = {
        "strategy": result.name,
        "milliseconds": result.predicted_seconds * 1e3,
        "balance": result.balance,
        "inter_node_all_to_all_megabytes": result.cost.all_to_all_bytes(TrafficLink.INTER_NODE) / 1e6,
        "stored_gigabytes": float(result.memory_bytes.max()) / 1e9,
    }
    for name in ("reading_seconds", "host_bytes", "accesses_in_fast_memory", "solver_gap"):
        if name in result.figures:
            figures[name] = result.figures[name]
    return figures


def hottest_rows_in_fast_memory(case: PlanningProblem) -> BaselineResult:
    """Return flexd's chain with all rows at HOME, the rows read most often in fast memory, for good.

    A home reads a row once a step, however many ranks request it. (Frames follow the batches and miss less than a
    fixed choice does: docs/benchmarks.md, "Rows in two memories".)
    """
    memories, world = TwoMemories(), case.layout.world_size
    reads, number, wire, stored, home = [], [], [], [], []
    for group in case.sums:
        load = group.load
        reads += [group.listed[ANYWHERE], load.bin_statistics(case.layout)[ANYWHERE]]
        number += [np.ones(len(load.keys)), load.bin_rows]
        home += [group.home_rank, np.full(len(load.bin_rows), -1)]
        count = len(load.keys) + len(load.bin_rows)
        wire.append(np.full(count, float(load.wire_bytes)))
        stored.append(np.full(count, float(load.row_bytes + load.state_bytes)))
    a_row, rows, size, space, at = (np.concatenate(part) for part in (reads, number, wire, stored, home))
    order = np.argsort(-a_row * size / space, kind="stable")
    a_row, rows, size, space, at = (part[order] for part in (a_row, rows, size, space, at))
    taken = np.cumsum(rows * space)
    room = case.memory_bytes * world - (taken - rows * space)
    fast = np.clip(room / (rows * space), 0.0, 1.0)
    read = a_row * rows * size
    seconds = memories.reading_seconds(read, fast)
    listed = at >= 0
    by_home = np.bincount(at[listed], weights=seconds[listed], minlength=world) + seconds[~listed].sum() / world
    used = np.full(world, float(rows @ (space * fast)) / world)
    figures = {
        "reading_seconds": float(by_home.max()),
        "host_bytes": float(rows @ (space * (1 - fast))) / world,
        "accesses_in_fast_memory": float(read @ fast / read.sum()),
    }
    return BaselineResult(ROWS_IN_TWO_MEMORIES, "", "", TWO_HOP.price(case.sums, case.cluster), used, figures)


def pooled_checks(problems: Sequence[Figures]) -> list[Figures]:
    """Rows at homes against the best of whole tables, by exchange and, where capacity binds, by reading too."""
    worst: dict[str, float] = {}
    for problem in problems:
        named = {row["strategy"]: row for row in problem["strategies"] if "milliseconds" in row}
        mine = named.keys() & {TWO_HOP.name, ROWS_IN_TWO_MEMORIES}
        times = {name: row["milliseconds"] + row.get("reading_seconds", 0.0) * 1e3 for name, row in named.items()}
        peers = [time for name, time in times.items() if name not in {*mine, ROW_WISE.name}]
        ratio = min(times[name] for name in mine) / min(peers)
        worst[problem["problem"]] = max(worst.get(problem["problem"], 0.0), ratio)
    return [
        check(f"pooled tables, {name}: flexd over the best of whole tables, worst skew", ratio, "< 1", ratio < 1)
        for name, ratio in worst.items()
    ]


def show_pooled(problems: Sequence[Figures]) -> None:
    for problem in problems:
        print(
            f"\n{problem['tables']} pooled tables, {problem['ranks']} ranks, Zipf {problem['skew']}, "
            f"{problem['problem']}: {problem['fast_gigabytes']:.2f} GB a rank, its share of the tables "
            f"{problem['share_gigabytes']:.2f} GB"
        )
        for row in problem["strategies"]:
            if "not_applicable" in row:
                print(f"  {row['strategy']:28}{row['not_applicable']}")
                continue
            line = (
                f"  {row['strategy']:28}{row['milliseconds']:10.2f} ms of exchange, balance {row['balance']:5.2f}, "
                f"{row['inter_node_all_to_all_megabytes']:9.2f} MB between nodes, {row['stored_gigabytes']:6.2f} GB"
            )
            if "reading_seconds" in row:
                line += (
                    f"; {row['reading_seconds'] * 1e3:8.2f} ms of reading, "
                    f"{row['accesses_in_fast_memory']:.1%} in fast memory"
                )
            if "solver_gap" in row:
                line += f", solver's gap {row['solver_gap']:.1%}"
            print(line)
