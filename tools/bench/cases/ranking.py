"""A ranking model on an emulated cluster: flexd beside TorchRec by its own plan, AutoShard's greedy and flexd's plan.

Pooled and sequence tables scaled from a list (``ranking_tables``; ``--tables`` reads the columns of TorchRec's
published example) on two nodes of two ranks, joined by a slow link. All strategies are trained by the same processes on
the same batches from the same initial values with row-wise Adagrad and summed gradients, in turns, with the link
limited and unlimited; their losses must agree. Plans are made from the same list and link rate; flexd's also from the
step costs that ``flexd probe`` measures. TorchRec's planner takes perfect statistics of the look-ups. ``own_over`` is
the step of TorchRec by its own plan over the step of a strategy, the median of the runs.

Needs root, ip, tc and setpriv; says so and ends well without. Without TorchRec (``make torchrec``) its rows are
missing. ``--quick`` trains half of the tables with 32 samples for two steps: losses alone are checked.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexd.planner.tables.sharding import read_tables
from tools.bench import strategies
from tools.bench.harness import Outcome, at_least, at_most, of_runs
from tools.bench.planning import made_up_tables
from tools.bench.ranking_tables import Setting, scaled
from tools.bench.ranks import training_ranks
from tools.bench.strategies import SPREAD_OF, Bench, Effort

OWN, FLEXD = "TorchRec, its own plan", ("flexd", "flexd, prefetch pipeline")
LOSS_TOLERANCE = 2e-3
FASTER, NOT_SLOWER = 1.5, 1.0
"""Least step time of TorchRec by its own plan over flexd's, on the limited and on the unlimited link."""


def arguments(parser: ArgumentParser) -> None:
    strategies.arguments(parser, rounds=4, steps=8)
    parser.add_argument("--tables", type=Path, metavar="CSV", help="a list as TorchRec's published example")
    parser.add_argument("--samples", type=int, default=128, help="of a rank in a step")


def run_setting(setting: Setting, rate_mbit: float, effort: Effort, wanted: Sequence[str] | None) -> dict[str, Any]:
    """Return all figures of one run."""
    with training_ranks("tools.bench.programs.ranking", setting) as (cluster, ranks):
        bench = Bench(cluster, ranks, rate_mbit, wanted)
        rows = bench.measure(effort, dense=True)
        for name, row in rows.items():
            if OWN in rows:
                row["own_over"] = rows[OWN]["step_seconds"] / row["step_seconds"]
                row["own_over_unlimited"] = rows[OWN]["unlimited_step_seconds"] / row["unlimited_step_seconds"]
            row["plan"] = kinds_of(bench.prepared["plans"][name])  # type: ignore[assignment]
            print(f"{name}: {row['plan']}")
        return {
            "rows": rows,
            "loss_differences": bench.loss_differences(),
            "greedy": bench.prepared["greedy"],
            "costs": bench.prepared["costs"],
        }


def checks_of(answer: dict[str, Any], *, full_size: bool) -> list[dict[str, Any]]:
    """Losses always; step times only where the setting is the one that they were asked for."""
    checks = [
        at_most(f"{name}: losses differ by", value, LOSS_TOLERANCE)
        for name, value in answer["loss_differences"].items()
    ]
    rows = [row for name, row in answer["rows"].items() if name in FLEXD and "own_over" in row]
    if full_size and rows:
        name = "TorchRec's own plan over flexd: step"
        checks.append(at_least(name, max(row["own_over"] for row in rows), FASTER))
        best = max(row["own_over_unlimited"] for row in rows)
        checks.append(at_least(f"{name} on an unlimited link", best, NOT_SLOWER))
    return checks


def kinds_of(document: dict[str, Any]) -> str:
    """Return how many tables a plan holds in which way."""
    if "tables" in document:
        counts = Counter(
            entry["sharding"].partition(":")[0] + (f", {entry['pooling_at']}" if entry["pooling_at"] else "")
            for entry in document["tables"]
        )
    else:
        counts = Counter(
            entry["sharding_type"] for entries in document["modules"].values() for entry in entries.values()
        )
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def run(options: Namespace) -> Outcome:
    listed = read_tables(options.tables) if options.tables else made_up_tables()
    samples, effort = 32 if options.quick else options.samples, Effort.of(options)
    setting = Setting(scaled(listed, 12 if options.quick else 24, samples), samples=samples)
    answers = [run_setting(setting, options.rate_mbit, effort, options.strategies) for _ in range(effort.runs)]
    answer = of_runs(answers, SPREAD_OF)
    worst = {name: max(of["loss_differences"][name] for of in answers) for name in answer["loss_differences"]}
    answer["loss_differences"] = worst
    return Outcome(answer, checks_of(answer, full_size=not options.quick))


SECTIONS = {"strategies": run}
