#!/usr/bin/env python3
"""One rank of tools/bench_step_plans.py: the ranking model by random rules and answers, trained in turns."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import bench_ranking_rank
import numpy as np
import torch
import torch.distributed as dist
from bench_ranking_data import Setting, given_cluster
from cluster_ranks import answer_questions

from flexd.core.layout import RankLayout
from flexd.embedding.exchange.process_groups import layout_from_environment
from flexd.embedding.kernels.step_probe import measure_step_costs
from flexd.planner.tables.chain_costs import chain_options
from flexd.planner.tables.home_rules import RulePlan
from flexd.planner.tables.options import TableOptions
from flexd.planner.tables.rank_loads import Pieces, RankLoads
from flexd.planner.tables.sharding import TableStatistics, listed_work
from flexd.planner.tables.solve import TablePlacement, step_seconds

UNLIMITED_MBIT = 8e3 * 2
"""Prices of the link without a limit: a rank has as much as inside a node (``bench_ranking_data``)."""


def random_pieces(options: TableOptions, layout: RankLayout, rng: np.random.Generator) -> Pieces:
    """Return a plan whose tables prefer some ways to hold and answer them; of the others it has a few, or none."""
    weights = rng.dirichlet(np.full(len(options.options), 0.5))
    count = len(options.names)
    chosen = np.empty(count, np.int64)
    for table in range(count):
        share = np.where(options.allowed[table], weights + 1e-9, 0.0)
        chosen[table] = rng.choice(len(share), p=share / share.sum())
    places = np.array([options.options[at].places(layout) for at in chosen.tolist()])
    return Pieces(np.arange(count), chosen, rng.integers(0, places))


def random_plans(setting: Setting, tables: TableOptions, number: int, seed: int) -> list[tuple[Pieces, dict[str, Any]]]:
    """Return plans, and the documents that trainers read."""
    found, layout = [], setting.layout
    for plan in range(number):
        pieces = random_pieces(tables, layout, np.random.default_rng([seed, plan]))
        seconds = step_seconds(tables, layout, pieces)
        loads = RankLoads.of(tables, layout, np.full(layout.world_size, np.inf), pieces).total
        flat = loads.reshape(len(loads), -1)
        placement = TablePlacement(tables, layout, pieces, seconds, 0.0, seconds, None, flat[:-1], flat[-1])
        found.append((pieces, RulePlan(tuple(setting.listed()), placement).document()))
    return found


class Rank(bench_ranking_rank.Rank):
    """Every question is collective."""

    def prepare_plans(self, rate_mbit: float, number: int, seed: int) -> dict[str, Any]:
        """Measure step costs, draw plans, and predict a step of each on the limited and on the unlimited link."""
        setting = self._setting
        costs = measure_step_costs(setting.layout, torch.device("cpu"), bench_ranking_rank.COST_SECONDS)
        work = listed_work(setting.listed(), setting.layout, TableStatistics(setting.zipf))
        priced = [
            chain_options(work, setting.layout, replace(given_cluster(setting, rate), step_costs=costs))
            for rate in (rate_mbit, UNLIMITED_MBIT)
        ]
        plans = random_plans(setting, priced[0], number, seed)
        self._documents = {f"plan {at}": document for at, (_, document) in enumerate(plans)}
        shared = [self._documents]
        dist.broadcast_object_list(shared, src=0)
        self._documents = shared[0]
        predicted = [[step_seconds(tables, setting.layout, pieces) for tables in priced] for pieces, _ in plans]
        return {"costs": asdict(costs), "predicted": predicted}

    def make(self, strategy: str) -> None:
        self._trainer[strategy] = bench_ranking_rank.FlexdTrainer(
            self._setting, self._batches, self._documents[strategy], run_ahead=False
        )


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=bench_ranking_rank.TIMEOUT)
    setting = Setting(**json.loads(sys.argv[1]))
    if layout_from_environment() != setting.layout:
        raise SystemExit(f"started as {layout_from_environment()}, set as {setting.layout}")
    answer_questions(Rank(setting).answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
