#!/usr/bin/env python3
"""RecShard's comparison: pooled tables of different skew in a fast memory that does not hold them, and after drift.

    python tools/bench_recshard.py [--quick] [--json] [--tables FILE.csv] [--share 0.25] [--moved 0.5]

Whole tables by size and by look-ups, RecShard's MILP (which rank a table belongs to and how many of its hottest rows
are in fast memory, once), and flexd's rows at homes with frames. Tables of a list (``planner_problems``: TorchRec's
published one with ``--tables``, otherwise one made up) with their rows and batch divided by a scale, each with a Zipf
exponent of its own. All strategies are counted on the same drawn batches: accesses to rows in slow memory, as RecShard
counts them; and distinct rows of a step read from slow memory, which is what a system needs that reads a row once a
step, however many samples use it. flexd's are those of the frame table, each rank's and dim-group's replayed.

Half way the popularity of the rows in a share of the tables moves. Counting begins when the frames are warm, and again
right after the move.

Balance: the slow accesses of the busiest rank over the mean. Reading: of the slowest rank, 1,555 GB/s and 32 GB/s.

Checks, as planned and after the move: flexd reads fewer rows from slow memory than RecShard has slow accesses, and than
it would have with a row read once a step; its busiest rank is nearer to the mean.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from bench_report import check, ending
from planner_problems import made_up_tables

from flexd.core.fast_memory import FRAME_BYTES
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.embedding.store.slow.frame_table import FrameTable
from flexd.embedding.store.slow.tier import HALF_LIFE_FILLINGS
from flexd.embedding.store.slow.two_memories import TwoMemories
from flexd.planner.baselines import PlanningProblem
from flexd.planner.baselines.recshard import RECSHARD
from flexd.planner.baselines.two_memories import TwoMemories as Bandwidths
from flexd.planner.baselines.whole_tables import (
    TABLE_WISE_LOOKUP_HOST,
    TABLE_WISE_SIZE_HOST,
    fast_tables,
    make_shards,
    place_greedily,
)
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.tables.table_list import ListedTable, read_tables
from flexd.sketch.profile import Profile
from flexd.sketch.zipf_profile import zipf_table
from flexd.topology.files import load_preset

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Figures = dict[str, Any]

LAYOUT = RankLayout(2, 8)
"""RecShard's experiments have 16 GPUs."""
EXPONENTS = (0.7, 1.4)
PAPER = {"fewer slow accesses": 87.0, "better balance": 12.0}
"""RecShard's abstract: from production models of Meta, over the best of whole tables."""
PLANNED, MOVED = "as planned", "moved"
FLEXD, DIVIDED = "flexd", "flexd, divided by access"


@dataclass(frozen=True)
class Tables:
    """Pooled tables with a popularity each; rows are numbered from 0 over all tables, popular ones first in each.

    Attributes:
        row_bytes: float64[tables], read from a memory.
        stored_bytes: float64[tables], of a row with its optimizer state.
        accesses: float64[tables], of all ranks in one step.
        first: int64[tables + 1], first row.
        cumulative: for each table float64[rows], shares of the accesses added up.
    """

    keyspace: KeySpace
    row_bytes: Float64Array
    stored_bytes: Float64Array
    accesses: Float64Array
    exponents: Float64Array
    first: Int64Array
    cumulative: list[Float64Array]

    @classmethod
    def of(cls, listed: Sequence[ListedTable], scale: float) -> Tables:
        rows = [max(10, round(table.rows / scale)) for table in listed]
        specs = [
            TableSpec(table.name, count, table.dim, "float16", "rowwise_adagrad")
            for table, count in zip(listed, rows, strict=True)
        ]
        exponents = np.random.default_rng(7).uniform(*EXPONENTS, len(listed))
        cumulative = []
        for count, exponent in zip(rows, exponents, strict=True):
            share = np.arange(1, count + 1) ** -exponent
            cumulative.append(np.cumsum(share / share.sum()))
        samples = listed[0].batch * LAYOUT.world_size / scale
        return cls(
            KeySpace(specs),
            np.array([float(spec.row_bytes) for spec in specs]),
            np.array([float(spec.row_bytes + spec.state_bytes) for spec in specs]),
            np.array([table.lookups * samples for table in listed]),
            exponents, np.concatenate([[0], np.cumsum(rows)]), cumulative,
        )  # fmt: skip

    def batches(self, steps: int, moved_at: int, moved_share: float, seed: int) -> Iterator[Int64Array]:
        """Yield the rows that the samples of a step access. From ``moved_at`` on the rows of a share of the tables
        have changed places in the order of popularity."""
        generator = np.random.default_rng(seed)
        tables = len(self.cumulative)
        moves = generator.permutation(tables) < round(moved_share * tables)
        order = [generator.permutation(len(cumulative)) for cumulative in self.cumulative]
        for step in range(steps):
            accesses = []
            for table, number in enumerate(generator.poisson(self.accesses)):
                drawn = np.searchsorted(self.cumulative[table], generator.random(number))
                drawn = np.minimum(drawn, len(self.cumulative[table]) - 1)
                if step >= moved_at and moves[table]:
                    drawn = order[table][drawn]
                accesses.append(self.first[table] + drawn)
            yield np.concatenate(accesses)


class Static:
    """Whole tables on ranks, some rows of each in fast memory for good."""

    def __init__(self, tables: Tables, rank: Int64Array, fast_rows: Float64Array) -> None:
        number = np.diff(tables.first)
        within = np.arange(tables.first[-1]) - np.repeat(tables.first[:-1], number)
        self._slow = within >= np.repeat(np.floor(fast_rows), number)
        self._rank = np.repeat(rank, number)

    def step(self, rows: Int64Array, counts: Int64Array) -> tuple[Int64Array, Float64Array, Float64Array]:
        """Distinct rows and how often each is accessed -> (rank, accesses in slow memory, rows read there) of each."""
        slow = self._slow[rows]
        return self._rank[rows], counts * slow, slow.astype(np.float64)


class Frames:
    """Rows at homes by number, frames in fast memory, as collections have them."""

    def __init__(self, tables: Tables, frames: Sequence[int]) -> None:
        keyspace, world = tables.keyspace, LAYOUT.world_size
        number = np.diff(tables.first)
        group = np.zeros(len(number), dtype=np.int64)
        for at, dim_group in enumerate(keyspace.groups):
            group[list(dim_group.tables)] = at
        within = np.arange(tables.first[-1]) - np.repeat(tables.first[:-1], number)
        key = within + np.repeat(np.asarray(keyspace.first_key), number)
        self._group, self._rank, self._slot = np.repeat(group, number), key % world, key // world
        device = torch.device("cpu")
        self._tables = [
            [
                FrameTable(count, int(self._slot.max()), device, half_life=HALF_LIFE_FILLINGS)
                for _ in range(world)
            ]
            for count in frames
        ]  # fmt: skip
        self._kept = [
            torch.full((world, int(self._slot.max()) + 1), -torch.inf, dtype=torch.float64) for _ in frames
        ]  # fmt: skip
        self._clock: defaultdict[FrameTable, float] = defaultdict(float)
        self.written = 0

    def step(self, rows: Int64Array, counts: Int64Array) -> tuple[Int64Array, Float64Array, Float64Array]:
        """As ``Static.step``. A row that is read is in a frame for all its accesses of the step."""
        missed = np.zeros(len(rows))
        place = self._group[rows] * LAYOUT.world_size + self._rank[rows]
        order = np.argsort(place, kind="stable")
        cuts = np.flatnonzero(np.diff(place[order])) + 1
        for at in np.split(order, cuts):
            if len(at):
                group, rank = divmod(int(place[at[0]]), LAYOUT.world_size)
                missed[at] = self._visit(self._tables[group][rank], self._kept[group][rank], self._slot[rows[at]])
        return self._rank[rows], missed, missed

    def _visit(self, table: FrameTable, kept: torch.Tensor, slots: Int64Array) -> npt.NDArray[np.bool_]:
        missed = np.zeros(len(slots), dtype=np.bool_)
        for first in range(0, len(slots), table.frames):
            part = torch.from_numpy(slots[first : first + table.frames])
            arrivals = table.bring(part)
            self._clock[table] += len(part) / table.frames
            self.written += len(arrivals.evicted_slots)
            kept[arrivals.evicted_slots] = arrivals.evicted_counts
            come = arrivals.missing
            table.remember(arrivals.frames[come], kept[part[come]])
            table.use(arrivals.frames, self._clock[table])
            table.changed(arrivals.frames)
            table.release(arrivals.frames)
            missed[first + come.numpy()] = True
        return missed


def divided_by_access(tables: Tables, memory_bytes: float) -> list[int]:
    """Return the frames of each dim-group on a rank: those of the rows most likely used in a step, by byte."""
    number = np.diff(tables.first)
    share = np.concatenate([np.diff(cumulative, prepend=0.0) for cumulative in tables.cumulative])
    used = -np.expm1(-np.repeat(tables.accesses, number) * share)
    size = np.repeat(tables.stored_bytes + FRAME_BYTES, number)
    order = np.argsort(-used / size, kind="stable")
    chosen = order[np.cumsum(size[order]) <= memory_bytes * LAYOUT.world_size]
    table = np.repeat(np.arange(len(number)), number)[chosen]
    taken = np.bincount(table, minlength=len(number))
    return [max(1, int(taken[list(group.tables)].sum()) // LAYOUT.world_size) for group in tables.keyspace.groups]


def strategies(tables: Tables, memory_bytes: float, preset: str) -> dict[str, Static | Frames]:
    specs, world = tables.keyspace.tables, LAYOUT.world_size
    profile = Profile(
        tuple(
            zipf_table(spec.name, spec.rows, float(exponent), min(spec.rows, 1_000), float(accesses), 0)
            for spec, exponent, accesses in zip(specs, tables.exponents, tables.accesses, strict=True)
        ),
        generation=1, samples=10**9,
    )  # fmt: skip
    shape = TrainingShape(bags_per_step={spec.name: 1.0 for spec in specs})
    slots = (0,) * len(tables.keyspace.groups)
    case = PlanningProblem(profile, tables.keyspace, LAYOUT, load_preset(preset), memory_bytes, slots, shape)
    shards = make_shards(case)
    answer: dict[str, Static | Frames] = {}
    for peer in (TABLE_WISE_SIZE_HOST, TABLE_WISE_LOOKUP_HOST):
        cost, host = peer.cost(shards), Bandwidths().host_bytes
        rank = place_greedily(cost, shards.bytes, world, memory_bytes + host)
        if rank is None:
            raise AssertionError("host memory holds all tables")
        fast = fast_tables(cost, shards.bytes, rank, world, memory_bytes)
        answer[peer.name] = Static(tables, rank, fast * shards.rows)
    placed = RECSHARD.place(case)
    if placed is None:
        raise AssertionError("a split with all rows in host memory fits")
    answer["recshard"] = Static(tables, placed.rank, placed.fast_rows)
    today = TwoMemories(int(memory_bytes), None).frames(tables.keyspace.groups, LAYOUT)
    answer[FLEXD] = Frames(tables, today)
    answer[DIVIDED] = Frames(tables, divided_by_access(tables, memory_bytes))
    return answer


def replay(
    tables: Tables, held: dict[str, Static | Frames], steps: int, moved_share: float
) -> dict[str, dict[str, Figures]]:
    """Return figures a step by strategy and period; a period is ``steps`` long, after as many to warm up."""
    bandwidths, world = Bandwidths(), LAYOUT.world_size
    table_of = np.repeat(np.arange(len(tables.cumulative)), np.diff(tables.first))
    sums = {
        (name, period): {"slow": np.zeros(world), "rows": np.zeros(world), "seconds": np.zeros(world), "written": 0}
        for name in held
        for period in (PLANNED, MOVED)
    }  # fmt: skip
    accesses = {PLANNED: 0, MOVED: 0}
    for step, keys in enumerate(tables.batches(3 * steps, 2 * steps, moved_share, seed=1)):
        rows, counts = np.unique(keys, return_counts=True)
        size = tables.row_bytes[table_of[rows]]
        period = MOVED if step >= 2 * steps else PLANNED
        for name, strategy in held.items():
            before = getattr(strategy, "written", 0)
            rank, slow, read = strategy.step(rows, counts)
            if step < steps:
                continue
            # With frames every row is read once a step; whole tables read one a sample.
            reads = np.ones(len(rows)) if isinstance(strategy, Frames) else counts.astype(np.float64)
            seconds = (reads - slow) * size / bandwidths.fast_bytes_per_second
            seconds += slow * size / bandwidths.slow_bytes_per_second
            total = sums[name, period]
            for figure, values in (("slow", slow), ("rows", read), ("seconds", seconds)):
                total[figure] += np.bincount(rank, weights=values, minlength=world)
            total["written"] += getattr(strategy, "written", 0) - before
        if step >= steps:
            accesses[period] += len(keys)
    answer: dict[str, dict[str, Figures]] = {name: {} for name in held}
    for (name, period), total in sums.items():
        slow = total["slow"]
        answer[name][period] = {
            "slow accesses": float(slow.sum()) / steps, "rows read": float(total["rows"].sum()) / steps,
            "share": float(slow.sum()) / accesses[period], "rows written back": total["written"] / steps,
            "balance": float(slow.max() / max(slow.mean(), 1e-300)),
            "reading_seconds": float(total["seconds"].max()) / steps,
        }  # fmt: skip
    return answer


def beside_paper(answer: dict[str, dict[str, Figures]]) -> dict[str, dict[str, float]]:
    """Return, for RecShard and flexd, slow accesses and balance of the best whole tables over theirs."""
    whole = [figures[PLANNED] for name, figures in answer.items() if name.startswith("table_wise")]
    few, balance = (min(figures[name] for figures in whole) for name in ("slow accesses", "balance"))
    return {
        name: {
            "fewer slow accesses": few / max(answer[name][PLANNED]["slow accesses"], 1e-300),
            "better balance": balance / answer[name][PLANNED]["balance"],
        }
        for name in ("recshard", FLEXD, DIVIDED)
    }  # fmt: skip


def checks_of(answer: dict[str, dict[str, Figures]]) -> list[dict[str, Any]]:
    checks = []
    for period in (PLANNED, MOVED):
        ours, theirs = answer[DIVIDED][period], answer["recshard"][period]
        for name, mine, least in (
            ("rows read / RecShard's slow accesses", "rows read", "slow accesses"),
            ("rows read / RecShard's, each once a step", "rows read", "rows read"),
            ("balance / RecShard's", "balance", "balance"),
        ):
            ratio = ours[mine] / max(theirs[least], 1e-300)
            checks.append(check(f"{period}: {name}", ratio, "< 1", ratio < 1))
    return checks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, metavar="FILE.csv", help="TorchRec's published list")
    parser.add_argument("--number", type=int, default=400, help="pooled tables of the list")
    parser.add_argument("--scale", type=float, default=1_000.0, help="rows and batch are divided by it")
    parser.add_argument("--share", type=float, default=0.25, help="of the tables that fast memory holds")
    parser.add_argument("--moved", type=float, default=0.5, help="share of the tables whose popularity moves")
    parser.add_argument("--steps", type=int, default=40, help="of a period")
    parser.add_argument("--preset", default="azure-a100-200g")
    parser.add_argument("--quick", action="store_true", help="40 tables, 10 steps, a scale of 10,000 at least")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.quick:
        given.number, given.steps, given.scale = 40, 10, max(given.scale, 10_000.0)
    torch.set_num_threads(1)
    listed = [table for table in (read_tables(given.tables) if given.tables else made_up_tables()) if table.bags > 0]
    listed = [replace(table, batch=listed[0].batch) for table in listed[: given.number]]
    tables = Tables.of(listed, given.scale)
    whole = float(np.diff(tables.first) @ tables.stored_bytes)
    memory = given.share * whole / LAYOUT.world_size
    print(
        f"{len(listed)} pooled tables, {tables.first[-1]:,} rows ({whole / 1e6:.1f} MB), Zipf {EXPONENTS[0]:g} to "
        f"{EXPONENTS[1]:g}, {tables.accesses.sum():,.0f} accesses a step, {LAYOUT.world_size} ranks, fast memory for "
        f"{given.share:.0%}; moved: the popularity in {given.moved:.0%} of the tables"
    )
    answer = replay(tables, strategies(tables, memory, given.preset), given.steps, given.moved)
    for name, periods in answer.items():
        for period, figures in periods.items():
            print(
                f"  {name:26}{period:12}{figures['slow accesses']:12,.0f} slow accesses a step ({figures['share']:.2%} "
                f"of all), {figures['rows read']:9,.0f} rows read once, {figures['rows written back']:9,.0f} written "
                f"back; balance {figures['balance']:5.2f}, reading {figures['reading_seconds'] * 1e6:9.1f} us"
            )
    paper = {"RecShard's paper": PAPER} | beside_paper(answer)
    for name, figures in paper.items():
        print(
            f"  {name:26}{figures['fewer slow accesses']:8.1f} times fewer slow accesses than the best whole tables, "
            f"{figures['better balance']:6.2f} times better balance"
        )
    return ending({"strategies": answer, "beside the paper": paper}, checks_of(answer), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
