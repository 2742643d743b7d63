"""AutoShard's policy, trained here, beside greedy placements, RecShard, TorchRec's planner and flexd on held-out tasks.

    python tools/bench_autoshard.py --quick
    python tools/bench_autoshard.py [--tables tables.csv] [--kernels FILE] [--updates 1500] [--measure] [--json]

50 to 200 pooled tables of a list on 4 to 16 ranks. The policy is trained on small random tasks of half of the list's
tables; the tasks that are compared have tables of the other half. "busiest": look-up and update of the busiest rank,
with learned costs from a file of ``flexd probe --kernels``, or bytes over an assumed bandwidth; "balance": least over
most of the ranks (AutoShard's measure). "step": exchange and kernels phase by phase, over flexd's exchange; TorchRec's
plan has other shardings and another exchange, so it has no step here. Times of planning and training are processor
seconds of this machine, with one thread of torch.

``--measure`` adds a task of tables scaled to what this machine holds: the look-ups and updates of every rank are run
one rank after the other, and the busiest counts.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchrec_peer
import torchrec_planner
from autoshard_policy import AutoShardPolicy, ShardingTask, train
from autoshard_tasks import SKEW, WHOLE, TablePool, analytic_costs, split_tables
from bench_kernel_costs import BATCH, LIMITS, kernels_of, measured, set_of
from bench_report import check, ending
from bench_tables import greedy_costs
from planner_problems import made_up_tables

from flexd.core.errors import PlanError
from flexd.core.layout import RankLayout
from flexd.planner.baselines.problem import PlanningProblem
from flexd.planner.baselines.recshard import RECSHARD
from flexd.planner.baselines.whole_tables import place_greedily
from flexd.planner.tables.chain_costs import OPTIONS, chain_options
from flexd.planner.tables.kernel_costs import PHASES, KernelCosts
from flexd.planner.tables.kernel_plans import KernelPrices, place_by_kernels
from flexd.planner.tables.options import Answer, Option
from flexd.planner.tables.rank_loads import Pieces, RankLoads
from flexd.planner.tables.sharding import listed_pieces
from flexd.planner.tables.solve import EVALUATIONS, TablePlacement, place_tables
from flexd.planner.tables.table_list import ListedTable, read_tables
from flexd.planner.tables.torchrec_costs import torchrec_options
from flexd.topology.cluster import Cluster
from flexd.topology.files import load_preset
from flexd.topology.kernel_design import MAX_TABLES
from flexd.topology.kernel_file import read_kernels

Figures = dict[str, Any]

PRESET = "azure-a100-200g"
RANK_MEMORY_BYTES = 40e9
RANDOM_DRAWS = 5
SAMPLED = 16
"""Placements that the policy draws besides its most probable one."""
TRAINED_ON = (RankLayout(1, 4), RankLayout(1, 8), RankLayout(2, 8))
TRAINED_TABLES = (10, 40)
CASES = ((50, RankLayout(1, 4)), (100, RankLayout(1, 8)), (200, RankLayout(2, 8)))
POLICY, BEST_OF, RANDOM = "AutoShard's policy", f"AutoShard's policy, {SAMPLED} drawn", "random (median)"
BY_KERNELS, ALL_RULES = "flexd, whole, by kernels", "flexd"
NEAR = 1.02
"""flexd shortens look-up and update one after the other, each as long as its own busiest rank; here both of one rank
count, as AutoShard adds them up."""
PUBLISHED = (
    ("AutoShard", "arXiv 2208.06399, abstract", "shards hundreds of tables in seconds"),
    (
        "NeuroShard", "arXiv 2305.01868, abstract",
        "up to 23.8% better than the state of the art on a benchmark data set; in production 11.6% less embedding "
        "cost, 6.6% more throughput",
    ),
)  # fmt: skip
"""Figures of the papers' own tables and machines."""


@dataclass(frozen=True)
class Case:
    """One held-out task.

    Attributes:
        learned: costs are learned ones: plans by bytes are refined by them.
        evaluations: of flexd's local searches.
    """

    pool: TablePool
    learned: bool
    evaluations: int = EVALUATIONS

    @cached_property
    def cluster(self) -> Cluster:
        return load_preset(PRESET).of_layout(self.pool.layout.nodes, self.pool.layout.local_ranks)

    @property
    def options(self) -> tuple[Option, ...]:
        """What flexd may do: costs are learned of look-ups with pooling, so that rows as answers have none."""
        return tuple(one for one in OPTIONS if not (self.learned and one.answer is Answer.ROWS))

    @cached_property
    def prices(self) -> KernelPrices:
        return self.prices_of(self.options)

    def prices_of(self, options: Sequence[Option], *, exchange: bool = True) -> KernelPrices:
        pool = self.pool
        priced = chain_options(pool.work, pool.layout, self.cluster, options=options)
        if not exchange:
            kernels_alone = priced.seconds_per_unit.copy()
            kernels_alone[: -len(PHASES)] = 0.0
            priced = replace(priced, seconds_per_unit=kernels_alone, answer_seconds=())
        return KernelPrices.of(priced, pool.work, pool.dims, pool.layout, pool.costs)

    def plan(self, prices: KernelPrices) -> Pieces:
        placed: TablePlacement = (
            place_by_kernels(prices, self.pool.memory_bytes, self.evaluations) if self.learned
            else place_tables(prices.tables, self.pool.layout, self.pool.memory_bytes, evaluations=self.evaluations)
        )  # fmt: skip
        return placed.pieces

    def whole(self, rank: np.ndarray) -> Pieces:
        """The plan of whole tables on these ranks."""
        option = self.options.index(WHOLE)
        return Pieces(np.arange(len(rank)), np.full(len(rank), option), rank.astype(np.int64))

    def whole_bound(self) -> float:
        """Seconds that the busiest rank takes at least with whole tables: the dearest one, or the mean where costs add
        up."""
        cost = self.pool.cost
        mean = 0.0 if self.learned else float(cost.sum()) / self.pool.layout.world_size
        return max(float(cost.max()), mean)

    def loads(self, prices: KernelPrices, pieces: Pieces) -> RankLoads:
        return RankLoads.of(prices.tables, self.pool.layout, np.full(self.pool.layout.world_size, np.inf), pieces)

    def kernel_seconds(self, prices: KernelPrices, pieces: Pieces) -> np.ndarray:
        """float64[W], look-up and update of every rank."""
        if self.learned:
            return np.asarray(prices.kernel_seconds(pieces).sum(axis=1))
        kernels = self.loads(prices, pieces).total[-1 - len(PHASES) : -1].reshape(len(PHASES), -1)
        return np.asarray(prices.tables.seconds_per_unit[-len(PHASES) :] @ kernels)

    def row(self, name: str, pieces: Pieces, seconds: float, prices: KernelPrices | None = None) -> Figures:
        """Figures of a plan; ``prices`` of another exchange than flexd's: no step."""
        of_rank = self.kernel_seconds(prices or self.prices, pieces)
        row: Figures = {
            "strategy": name,
            "busiest_milliseconds": float(of_rank.max()) * 1e3,
            "balance": float(of_rank.min() / of_rank.max()),
            "plan_seconds": seconds,
        }
        if prices is not None:
            return row
        step = self.prices.seconds(pieces) if self.learned else self.loads(self.prices, pieces).seconds()
        return row | {"step_milliseconds": step * 1e3}


def whole_plans(case: Case, policy: AutoShardPolicy) -> dict[str, Callable[[], np.ndarray | None]]:
    """Strategies that give every table a rank, or None where a table finds no room."""
    pool = case.pool
    world, size = pool.layout.world_size, pool.work.stored_bytes
    every = np.arange(len(pool.tables))
    plans: dict[str, Callable[[], np.ndarray | None]] = {}
    costs = greedy_costs(pool.work) | {"predicted cost": pool.cost}
    for name, cost in costs.items():
        plans[f"{name} greedy"] = lambda cost=cost: place_greedily(cost, size, world, pool.memory_bytes)  # type: ignore[misc]
    plans[POLICY] = lambda: policy.best(pool.task(every), 0)
    plans[BEST_OF] = lambda: policy.best(pool.task(every), SAMPLED)

    def recshard() -> np.ndarray | None:
        profile, keyspace, shape = pool.problem
        slots = (0,) * len(keyspace.groups)
        problem = PlanningProblem(profile, keyspace, pool.layout, case.cluster, pool.memory_bytes, slots, shape)
        placed = RECSHARD.place(problem)
        return None if placed is None else placed.rank

    plans["RecShard"] = recshard
    return plans


def torchrec_row(case: Case) -> Figures:
    """TorchRec's own planner with its default budget."""
    pool, name = case.pool, "TorchRec's planner"
    own, seconds = torchrec_planner.planned(pool.tables, pool.layout, pool.memory_bytes)
    try:
        listed = listed_pieces(own, pool.layout)
    except PlanError as error:
        return {"strategy": name, "not_applicable": f"planned in {seconds:.2f} s, not priced: {error}"}
    assert listed is not None
    loads = torchrec_options(pool.work, pool.dims, pool.layout, case.cluster, options=listed[0])
    prices = KernelPrices.of(loads, pool.work, pool.dims, pool.layout, pool.costs)
    return case.row(name, listed[1], seconds, prices)


def compare(
    title: str, case: Case, policy: AutoShardPolicy, *, torchrec: bool
) -> tuple[Figures, dict[str, np.ndarray]]:
    """Every strategy on a task; also the ranks of the tables in plans of whole tables."""
    pool = case.pool
    rng = np.random.default_rng(0)
    assert len(pool.cost) == len(case.prices.tables.names)  # made before any plan is timed
    draws = [rng.integers(0, pool.layout.world_size, len(pool.tables)) for _ in range(RANDOM_DRAWS)]
    busiest = [case.row("", case.whole(rank), 0.0)["busiest_milliseconds"] for rank in draws]
    places = {RANDOM: draws[int(np.argsort(busiest)[RANDOM_DRAWS // 2])]}
    rows = [case.row(RANDOM, case.whole(places[RANDOM]), 0.0)]
    for name, make in whole_plans(case, policy).items():
        started = time.process_time()
        rank = make()
        seconds = time.process_time() - started
        if rank is None:
            rows.append({"strategy": name, "not_applicable": "a table finds no rank with room for it"})
            continue
        places[name] = rank
        rows.append(case.row(name, case.whole(rank), seconds))
    if torchrec and torchrec_peer.missing() is None:
        rows.append(torchrec_row(case))
    own_plans: dict[str, Callable[[], Pieces]] = {
        BY_KERNELS: lambda: case.whole(case.plan(case.prices_of([WHOLE], exchange=False)).place),
        "flexd, whole, by step": lambda: case.whole(case.plan(case.prices_of([WHOLE])).place),
        ALL_RULES: lambda: case.plan(case.prices),
    }
    for name, plan in own_plans.items():
        started = time.process_time()
        try:
            pieces = plan()
        except PlanError as error:
            rows.append({"strategy": name, "not_applicable": str(error)})
            continue
        rows.append(case.row(name, pieces, time.process_time() - started))
        if name != ALL_RULES:
            places[name] = pieces.place
    return {
        "name": title, "tables": len(pool.tables), "ranks": pool.layout.world_size,
        "whole_bound_milliseconds": case.whole_bound() * 1e3, "strategies": rows,
    }, places  # fmt: skip


def scaled(tables: Sequence[ListedTable], ranks: int) -> list[ListedTable]:
    """Tables whose look-ups and rows this machine holds, as those of ``bench_kernel_costs``."""
    made = []
    for table in tables:
        most = int(LIMITS.memory_bytes / MAX_TABLES / (table.dim * 2 + 4))
        length = min(max(table.lookups / table.bags, 1.0), LIMITS.max_bag)
        made.append(replace(table, rows=min(table.rows, most), lookups=length, bags=1.0, batch=BATCH // ranks))
    return made


def measure(pool: TablePool, places: dict[str, np.ndarray]) -> dict[str, float]:
    """Measured milliseconds of the busiest rank, by plan."""
    ranks, found = pool.layout.world_size, {}
    kernels = kernels_of("flexd")
    tables = [
        (table.rows, table.dim, float(round(table.lookups * table.batch * ranks)), table.batch * ranks, SKEW)
        for table in pool.tables
    ]
    sets = [
        (name, set_of([tables[at] for at in np.flatnonzero(place == rank)]))
        for name, place in places.items() for rank in np.unique(place)
    ]  # fmt: skip
    _, seconds = measured(kernels, [one for _, one in sets], 6)
    for name in places:
        of_plan = np.array([owner == name for owner, _ in sets])
        found[name] = float(seconds[of_plan].sum(axis=1).max()) * 1e3
    return found


def trained_policy(
    tables: Sequence[ListedTable], costs: KernelCosts, updates: int, sizes: tuple[int, int]
) -> tuple[AutoShardPolicy, Figures]:
    """A policy trained on tasks of these tables, and how."""
    pools = [TablePool(tuple(tables), layout, costs, RANK_MEMORY_BYTES) for layout in TRAINED_ON]
    policy = AutoShardPolicy(pools[0].drawn(np.random.default_rng(0), 2, 2).features.shape[1])

    def draw(rng: np.random.Generator) -> ShardingTask:
        return pools[int(rng.integers(len(pools)))].drawn(rng, *sizes)

    started = time.process_time()
    history = train(policy, draw, updates)
    tenth = max(1, updates // 10)
    return policy, {
        "updates": updates,
        "train_seconds": time.process_time() - started,
        "first_busiest_over_bound": float(np.mean(history[:tenth])),
        "last_busiest_over_bound": float(np.mean(history[-tenth:])),
    }


def run(
    listed: Sequence[ListedTable], costs: KernelCosts | None, updates: int, *, quick: bool, measuring: bool
) -> Figures:
    rng, used = np.random.default_rng(0), costs or analytic_costs()
    train_on, held_out = split_tables(listed, RANK_MEMORY_BYTES, rng)
    policy, training = trained_policy(train_on, used, updates, (10, 20) if quick else TRAINED_TABLES)
    cases = []
    evaluations = EVALUATIONS // 6 if quick else EVALUATIONS
    for number, (count, layout) in enumerate(CASES[:2] if quick else CASES):
        drawn = [held_out[at] for at in np.sort(rng.choice(len(held_out), min(count, len(held_out)), replace=False))]
        pool = TablePool(tuple(drawn), layout, used, RANK_MEMORY_BYTES)
        case = Case(pool, costs is not None, evaluations)
        torchrec = not (quick and number)
        cases.append(compare(f"{count} tables, {layout.world_size} ranks", case, policy, torchrec=torchrec)[0])
    if measuring:
        layout = CASES[0][1]
        drawn = [held_out[at] for at in rng.choice(len(held_out), 32, replace=False)]
        pool = TablePool(tuple(scaled(drawn, layout.world_size)), layout, used, RANK_MEMORY_BYTES)
        found, places = compare(
            "32 scaled tables, measured", Case(pool, costs is not None, evaluations), policy, torchrec=False
        )
        for name, value in measure(pool, places).items():
            next(row for row in found["strategies"] if row["strategy"] == name)["measured_milliseconds"] = value
        cases.append(found)
    return {"costs": "learned" if costs else "analytic (bytes)", "training": training, "cases": cases}


def show(figures: Figures) -> None:
    training = figures["training"]
    print(
        f"costs: {figures['costs']}; policy trained with {training['updates']} updates in "
        f"{training['train_seconds']:.1f} s of processor: busiest device over its bound "
        f"{training['first_busiest_over_bound']:.2f} at first, {training['last_busiest_over_bound']:.2f} at last"
    )
    for case in figures["cases"]:
        print(
            f"\n{case['name']}: {case['tables']} pooled tables on {case['ranks']} ranks, Zipf {SKEW}, {PRESET}; whole "
            f"tables take {case['whole_bound_milliseconds']:.3f} ms at least"
        )
        print(f"  {'strategy':30}{'busiest ms':>11}{'balance':>9}{'step ms':>9}{'plan s':>9}{'measured ms':>13}")
        for row in case["strategies"]:
            if "not_applicable" in row:
                print(f"  {row['strategy']:30}{row['not_applicable']}")
                continue
            step = f"{row['step_milliseconds']:9.2f}" if "step_milliseconds" in row else f"{'-':>9}"
            timed = f"{row['measured_milliseconds']:13.2f}" if "measured_milliseconds" in row else f"{'-':>13}"
            print(
                f"  {row['strategy']:30}{row['busiest_milliseconds']:11.3f}{row['balance']:9.2f}{step}"
                f"{row['plan_seconds']:9.2f}{timed}"
            )
    print("\npublished, of other tables and machines: not compared")
    for name, source, figure in PUBLISHED:
        print(f"  {name:12}{source}: {figure}")


def checks(figures: Figures) -> list[Figures]:
    result = []
    for case in figures["cases"]:
        named = {row["strategy"]: row for row in case["strategies"] if "not_applicable" not in row}
        busiest = {name: row["busiest_milliseconds"] for name, row in named.items()}
        if POLICY in busiest:
            ratio = busiest[POLICY] / busiest[RANDOM]
            result.append(check(f"{case['name']}: AutoShard's policy over random", ratio, "< 1", ratio < 1))
        peers = [name for name in named if not name.startswith("flexd") and "step_milliseconds" in named[name]]
        for name, figure, most in (
            (BY_KERNELS, "busiest_milliseconds", NEAR), (ALL_RULES, "step_milliseconds", 1.0),
        ):  # fmt: skip
            least = min(named[peer][figure] for peer in peers)
            ratio = named[name][figure] / least if name in named else float("inf")
            title = f"{case['name']}: {name}, {figure.split('_')[0]}, over the best peer of whole tables"
            result.append(check(title, ratio, f"<= {most:g}", ratio <= most + 1e-9))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, metavar="CSV", help="a list as TorchRec's published example")
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="measurements of flexd probe --kernels")
    parser.add_argument("--updates", type=int, metavar="N", help="of the policy's training (1500; quick: 100)")
    parser.add_argument("--measure", action="store_true", help="run the plans of a scaled task on this machine")
    parser.add_argument("--quick", action="store_true", help="short training, fewer cases")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    updates = (100 if options.quick else 1500) if options.updates is None else options.updates
    if updates < 1:
        parser.error("--updates: give at least 1")
    torch.set_num_threads(1)
    listed = read_tables(options.tables) if options.tables else made_up_tables()
    costs = KernelCosts.learned(read_kernels(options.kernels)) if options.kernels else None
    figures = run(listed, costs, updates, quick=options.quick, measuring=options.measure)
    show(figures)
    return ending(figures, checks(figures), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
