#!/usr/bin/env python3
"""Predicted against measured step time of random plans: the ranking model with random home rules and answers.

The job, the cluster and the prices are those of tools/bench_ranking.py: two nodes of two ranks, their link limited,
with what ``flexd probe`` measures of a step beside its links. A plan draws how much it prefers each rule and answer,
and then one for every table, and where. All plans train in turns over several rounds; medians of their steps are
compared with the planner's prediction, by rank correlation. Without a limit of the link it is shown and not checked.
The correlation of the odd with the even rounds says what noise allows.

Needs root, ip, tc and setpriv; says so and exits 0 without.

Usage: tools/bench_step_plans.py [--quick] [--json] [--tables CSV] [--rate-mbit 200] [--plans 20] [--rounds 4]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from bench_ranking_data import Setting, scaled
from bench_report import check, ending
from cluster import Cluster, ClusterError, exit_on_sigterm, why_not
from cluster_ranks import Ranks
from planner_problems import made_up_tables
from scipy.stats import spearmanr

from flexd.planner.tables.table_list import read_tables

RANK_PROGRAM = Path(__file__).parent / "bench_step_plans_rank.py"
START_SECONDS, STEP_SECONDS = 240.0, 10.0
TARGET = 0.9
SEED = 3
LINKS = ("limited", "unlimited")


def run(setting: Setting, rate_mbit: float, plans: int, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of every plan: predicted [plans, links], measured [plans, links, rounds], medians of a round's steps."""
    command = [sys.executable, str(RANK_PROGRAM), json.dumps(asdict(setting))]
    measured = np.zeros((plans, len(LINKS), rounds))
    with (
        Cluster(setting.nodes, setting.local_ranks, burst_kib=64, mtu=9000) as cluster,
        Ranks(cluster, command, environment={"OMP_NUM_THREADS": "1"}) as ranks,
    ):
        cluster.limit(None)

        def train(plan: int, count: int) -> list[float]:
            question = {"ask": "train", "strategy": f"plan {plan}", "steps": count}
            answers = ranks.ask(question, 60 + STEP_SECONDS * count)
            return list(np.mean([answer["seconds"] for answer in answers], axis=0))

        wanted = {"ask": "prepare_plans", "rate_mbit": rate_mbit, "number": plans, "seed": SEED}
        prepared = ranks.ask(wanted, START_SECONDS)[0]
        for plan in range(plans):
            ranks.ask({"ask": "make", "strategy": f"plan {plan}"}, START_SECONDS)
            train(plan, 1)
        for number in range(rounds):
            for at, rate in enumerate((rate_mbit, None)):
                cluster.limit(rate)
                for plan in range(plans):
                    # The first step finds nothing of this plan in the caches.
                    measured[plan, at, number] = np.median(train(plan, steps + 1)[1:])
    return {"costs": prepared["costs"], "predicted": prepared["predicted"], "measured": measured.tolist()}


def compared(answer: dict[str, Any]) -> dict[str, Any]:
    """Rank correlations by link: of prediction and median, and of odd and even rounds (NaN with one round)."""
    predicted, measured = np.array(answer["predicted"]), np.array(answer["measured"])
    medians = np.median(measured, axis=2)
    result: dict[str, Any] = {}
    for at, link in enumerate(LINKS):
        halves = [np.median(measured[:, at, first::2], axis=1) for first in (0, 1) if measured.shape[2] > 1]
        result[link] = {
            "rank_correlation": float(spearmanr(predicted[:, at], medians[:, at]).statistic),
            "rounds_correlation": float(spearmanr(*halves).statistic) if halves else float("nan"),
            "predicted_seconds": predicted[:, at].tolist(),
            "measured_seconds": medians[:, at].tolist(),
        }
    return result


def show(found: dict[str, Any], costs: dict[str, float]) -> None:
    print(f"step costs: {', '.join(f'{name} {value:.3g}' for name, value in costs.items())}")
    print(f"{'plan':>5}" + "".join(f"{f'{link}: predicted':>22}{'measured, ms':>14}" for link in LINKS))
    for plan in range(len(found[LINKS[0]]["predicted_seconds"])):
        cells = (
            f"{1e3 * found[link]['predicted_seconds'][plan]:22.1f}{1e3 * found[link]['measured_seconds'][plan]:14.1f}"
            for link in LINKS
        )
        print(f"{plan:5}" + "".join(cells))
    for link in LINKS:
        of_link = found[link]
        print(
            f"{link}: rank correlation {of_link['rank_correlation']:.3f}, "
            f"of odd and even rounds {of_link['rounds_correlation']:.3f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, metavar="CSV", help="a list as TorchRec's published example")
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each plan, link and round")
    parser.add_argument("--quick", action="store_true", help="few plans, tables and steps; nothing is checked")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    exit_on_sigterm()
    quick = arguments.quick
    samples, plans, rounds, steps = (
        (32, 4, 2, 1) if quick else (128, arguments.plans, arguments.rounds, arguments.steps)
    )
    listed = read_tables(arguments.tables) if arguments.tables else made_up_tables()
    setting = Setting(scaled(listed, 12 if quick else 24, samples), samples=samples)
    try:
        answer = run(setting, arguments.rate_mbit, plans, rounds, steps)
    except ClusterError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    found = compared(answer)
    show(found, answer["costs"])
    value = found["limited"]["rank_correlation"]
    checks = [] if quick else [check("limited: rank correlation", value, f">= {TARGET}", value >= TARGET)]
    return ending(found, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
