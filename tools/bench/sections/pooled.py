"""Pooled tables before the start: flexd's sharding of a list beside AutoShard's greedy placements.

All are priced by the same model of flexd's exchange (docs/cost-model.md): every table by rows, every table by the
better of rows and sums, AutoShard's four greedy placements of whole tables (arXiv 2208.06399) that answer by sums, and
flexd's choice of home rule and answer. The busiest rank decides a step.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np

from flexd.core.layout import RankLayout
from flexd.planner.model.workload import ACCESSES
from flexd.planner.tables.chain_costs import OPTIONS, chain_options
from flexd.planner.tables.options import Answer, HomeKind, Option, TableOptions, TableWork
from flexd.planner.tables.rank_loads import Pieces, RankLoads
from flexd.planner.tables.solve import EVALUATIONS, place_tables
from flexd.planner.tables.table_list import ListedTable, read_tables
from flexd.topology.files import load_preset
from tools.bench.harness import Outcome, at_most
from tools.bench.peers.whole_tables import place_greedily
from tools.bench.planning import made_up_tables, problem_of

Figures = dict[str, Any]
RANK_MEMORY_BYTES = 40e9
SKEW = 1.05
LISTED_ROWS = 1000


def row_of(options: TableOptions, layout: RankLayout, pieces: Pieces | None, seconds: float) -> Figures:
    if pieces is None:
        return {"not_applicable": f"a table finds no rank with room for it ({RANK_MEMORY_BYTES:.3g} B)"}
    loads = RankLoads.of(options, layout, np.full(layout.world_size, RANK_MEMORY_BYTES), pieces)
    used = {options.options[o].answer for o in np.unique(pieces.option)}
    fixed = sum(of_answer for answer, of_answer in options.answer_seconds if answer in used)
    flat = loads.total.reshape(len(loads.total), -1)
    of_rank = options.axis_seconds @ flat[:-1]
    return {
        "milliseconds": (loads.seconds() + fixed) * 1e3, "balance": float(of_rank.min() / of_rank.max()),
        "memory_gigabytes": float(flat[-1].max()) / 1e9, "plan_seconds": seconds,
    }  # fmt: skip


def better_answer(options: TableOptions, layout: RankLayout, of: tuple[int, int]) -> np.ndarray:
    """Of two options that load all ranks alike the one of less time, by table."""
    seconds = options.mean(options.loads, layout) @ options.axis_seconds
    seconds = np.where(options.allowed, seconds, np.inf)
    return np.where(seconds[:, of[1]] < seconds[:, of[0]], of[1], of[0]).astype(np.int64)


def compare(tables: Sequence[ListedTable], layout: RankLayout, preset: str, evaluations: int = EVALUATIONS) -> Figures:
    """Every strategy on these tables; ``evaluations`` of flexd's local searches."""
    profile, keyspace, shape = problem_of(tables, layout.world_size, SKEW, [LISTED_ROWS] * len(tables))
    work = TableWork.of(profile, keyspace, layout, shape)
    options = chain_options(work, layout, load_preset(preset).of_layout(layout.nodes, layout.local_ranks))
    every, zero = np.arange(len(tables)), np.zeros(len(tables), np.int64)
    all_rows, all_sums, rank_rows, rank_sums = (
        OPTIONS.index(Option(home, answer))
        for home in (HomeKind.ALL, HomeKind.RANK)
        for answer in (Answer.ROWS, Answer.SUMS)
    )
    found = {"all, rows": row_of(options, layout, Pieces(every, zero + all_rows, zero), 0.0)}
    better = better_answer(options, layout, (all_rows, all_sums))
    found["all, better answer"] = row_of(options, layout, Pieces(every, better, zero), 0.0)
    dim, lookups = work.wire_bytes / 2, work.statistics[:, ACCESSES]
    for name, cost in {
        "size": dim * work.rows, "dim": dim, "lookup": dim * lookups,
        "size_lookup": dim * lookups * np.log10(np.maximum(work.rows, 10.0)),
    }.items():  # fmt: skip
        began = time.process_time()
        rank = place_greedily(cost, work.stored_bytes, layout.world_size, RANK_MEMORY_BYTES)
        answer = np.where(work.bags > 0, rank_sums, rank_rows)
        pieces = None if rank is None else Pieces(every, answer, rank.astype(np.int64))
        found[f"{name} greedy"] = row_of(options, layout, pieces, time.process_time() - began)
    began = time.process_time()
    placed = place_tables(options, layout, RANK_MEMORY_BYTES, evaluations=evaluations)
    found["flexd"] = row_of(options, layout, placed.pieces, time.process_time() - began) | {"gap": placed.gap}
    chosen = np.bincount(placed.pieces.option, minlength=len(OPTIONS))
    found["chosen"] = {option.name: int(count) for option, count in zip(OPTIONS, chosen, strict=True)}
    return found


def over_best(found: Figures, mine: str) -> float:
    peers = [row["milliseconds"] for name, row in found.items() if name != mine and "milliseconds" in row]
    return float(found[mine]["milliseconds"]) / min(peers)


def section(options: Namespace) -> Outcome:
    listed = read_tables(options.tables) if options.tables else made_up_tables()
    pooled = [table for table in listed if table.bags > 0]
    rng, figures, checks = np.random.default_rng(0), {}, []
    for count, layout in ((50, RankLayout(1, 4)), (100, RankLayout(1, 8)), (200, RankLayout(2, 8))):
        drawn = [pooled[at] for at in np.sort(rng.choice(len(pooled), count, replace=False)).tolist()]
        name = f"{count} pooled tables, drawn"
        figures[name] = compare(drawn, layout, options.preset)
        checks.append(at_most(f"{name}: flexd over the best peer", over_best(figures[name], "flexd"), 1.0))
    if not options.quick:
        figures["the whole list"] = found = compare(listed, RankLayout(12, 8), options.preset)
        checks.append(at_most("the whole list: flexd over the best peer", over_best(found, "flexd"), 1.0))
        checks.append(at_most("the whole list: seconds of processor", found["flexd"]["plan_seconds"], 10.0))
    return Outcome(figures, checks)
