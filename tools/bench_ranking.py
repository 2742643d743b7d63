#!/usr/bin/env python3
"""Step time of a ranking model on an emulated cluster: TorchRec by three plans, and flexd by its rules.

Pooled and sequence tables scaled from a list (tools/bench_ranking_data.py; ``--tables`` reads the columns of TorchRec's
published one, without it a made up list is scaled), attention over the sequences and a perceptron. Two nodes of two
ranks, joined by a slow link (tools/cluster.py). All strategies are trained by the same processes on the same batches
from the same initial values with the same optimizer (row-wise Adagrad, summed gradients), in turns, with the link
limited and unlimited; their losses must agree:

- TorchRec by the plan of its own planner, which is told the bandwidths and the look-ups, by the greedy placement of
  whole tables (AutoShard's baselines) whose step is predicted shortest, and by the plan of ``flexd shard``;
- flexd by the home rules and answers of ``flexd shard --for flexd``, with rows fetched in the step and ahead.

All plans are made for the limited link; flexd's with what ``flexd probe`` measures of a step beside its links.
TorchRec's un-pooled tables are never data-parallel (FBGEMM's dense kernel pools them on a CPU); pooled ones that are
have an optimizer of their own, the others the fused one. Bytes are those of the interface counters. With ``--runs``
above 1 (3 unless told, 1 with ``--quick``) figures are medians over runs.

Needs root, ip, tc and setpriv; says so and exits 0 without. Without TorchRec (``make torchrec``) its rows are missing.

Usage: tools/bench_ranking.py [--quick] [--json] [--tables CSV] [--rate-mbit 200] [--only NAME ...] [--runs 3]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_ranking_data import Setting, scaled
from bench_report import check, ending
from cluster import Cluster, ClusterError, exit_on_sigterm, why_not
from cluster_ranks import Ranks
from planner_problems import made_up_tables

from flexd.planner.tables.table_list import read_tables

RANK_PROGRAM = Path(__file__).parent / "bench_ranking_rank.py"
OWN, FLEXD = "TorchRec, its own plan", ("flexd", "flexd, run-ahead")
WARM_UP = 2
START_SECONDS, STEP_SECONDS = 240.0, 10.0
"""Deadlines: of everything before the first step, and of a step."""
LOSS_TOLERANCE = 2e-3
FASTER, NOT_SLOWER = 1.5, 1.0
"""Least step time of TorchRec by its own plan over flexd's, on the limited and on the unlimited link."""


@dataclass
class Samples:
    """Of one strategy: seconds by step, bytes between nodes a step by round, processor seconds of a rank and step."""

    limited: list[float] = field(default_factory=list)
    unlimited: list[float] = field(default_factory=list)
    inter_bytes: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "inter_node_bytes": median(self.inter_bytes),
            "step_seconds": median(self.limited),
            "unlimited_step_seconds": median(self.unlimited),
            "processor_seconds": median(self.processor),
        }


def run_setting(
    setting: Setting, rate_mbit: float, rounds: int, steps: int, only: Sequence[str] | None
) -> dict[str, Any]:
    """All figures of one run."""
    command = [sys.executable, str(RANK_PROGRAM), json.dumps(asdict(setting))]
    with (
        Cluster(setting.nodes, setting.local_ranks, burst_kib=64, mtu=9000) as cluster,
        Ranks(cluster, command, environment={"OMP_NUM_THREADS": "1"}) as ranks,
    ):
        cluster.limit(None)
        prepared = ranks.ask({"ask": "prepare", "rate_mbit": rate_mbit}, START_SECONDS)[0]
        lacks = prepared["strategies"]
        chosen = [name for name, why in lacks.items() if why is None and (only is None or name in only)]
        measured = {name: Samples() for name in chosen}

        def train(name: str, count: int) -> list[float]:
            answers = ranks.ask({"ask": "train", "strategy": name, "steps": count}, 60 + STEP_SECONDS * count)
            measured[name].losses.extend(np.mean([a["losses"] for a in answers], axis=0).tolist())
            measured[name].processor.append(float(np.mean([a["processor_seconds"] for a in answers])))
            return list(np.mean([a["seconds"] for a in answers], axis=0))

        for name in chosen:
            ranks.ask({"ask": "make", "strategy": name}, START_SECONDS)
            train(name, WARM_UP)
            measured[name].processor.clear()
        for _ in range(rounds):
            for name in chosen:
                cluster.limit(rate_mbit)
                before = cluster.sent()
                # The first step after a change of the link is not counted.
                measured[name].limited += train(name, steps + 1)[1:]
                measured[name].inter_bytes.append((cluster.sent() - before).inter / (steps + 1))
                cluster.limit(None)
                measured[name].unlimited += train(name, steps + 1)[1:]
    first = np.array(measured[chosen[0]].losses)
    return {
        "rows": {name: result.figures() for name, result in measured.items()},
        "loss_differences": {
            name: float(np.max(np.abs(np.array(result.losses) / first - 1))) for name, result in measured.items()
        },
        "lacks": {name: why for name, why in lacks.items() if why is not None},
        "greedy": prepared["greedy"],
        "plans": prepared["plans"],
        "costs": prepared["costs"],
    }


def of_runs(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the runs, the worst difference of losses, and [least, most] of both step times."""
    first = answers[0]
    rows: dict[str, dict[str, Any]] = {}
    for name in first["rows"]:
        of_name = [answer["rows"][name] for answer in answers]
        rows[name] = {figure: median(one[figure] for one in of_name) for figure in of_name[0]}
        for figure in ("step_seconds", "unlimited_step_seconds"):
            rows[name][f"{figure}_spread"] = [pick(one[figure] for one in of_name) for pick in (min, max)]
        if OWN in first["rows"]:
            rows[name]["own_over"] = median(
                answer["rows"][OWN]["step_seconds"] / answer["rows"][name]["step_seconds"] for answer in answers
            )
            rows[name]["own_over_unlimited"] = median(
                answer["rows"][OWN]["unlimited_step_seconds"] / answer["rows"][name]["unlimited_step_seconds"]
                for answer in answers
            )
    differences = {
        name: max(answer["loss_differences"][name] for answer in answers) for name in first["loss_differences"]
    }
    return first | {"rows": rows, "loss_differences": differences, "runs": len(answers)}


def checks_of(answer: dict[str, Any], *, full_size: bool) -> list[dict[str, Any]]:
    """Losses always; step times only where the setting is the one that they were asked for."""
    checks = [
        check(f"{name}: losses differ by", value, f"<= {LOSS_TOLERANCE}", value <= LOSS_TOLERANCE)
        for name, value in answer["loss_differences"].items()
    ]
    rows = {name: row for name, row in answer["rows"].items() if name in FLEXD and "own_over" in row}
    if full_size and rows:
        best = max(row["own_over"] for row in rows.values())
        checks.append(check("TorchRec's own plan over flexd: step", best, f">= {FASTER}", best >= FASTER))
        best = max(row["own_over_unlimited"] for row in rows.values())
        name = "TorchRec's own plan over flexd: step on an unlimited link"
        checks.append(check(name, best, f">= {NOT_SLOWER}", best >= NOT_SLOWER))
    return checks


def kinds_of(document: dict[str, Any]) -> str:
    """Return how many tables a plan holds in which way."""
    if "tables" in document:
        counts = Counter(
            f"{entry['homes'].partition(':')[0]}{'' if entry['answer'] is None else ' by ' + entry['answer']}"
            for entry in document["tables"]
        )
    else:
        counts = Counter(
            entry["sharding_type"] for entries in document["modules"].values() for entry in entries.values()
        )
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def show(answer: dict[str, Any], setting: Setting, rate_mbit: float) -> None:
    tables = setting.listed()
    pooled = sum(table.bags > 0 for table in tables)
    print(
        f"\n{pooled} pooled and {len(tables) - pooled} sequence tables of {sum(t.rows for t in tables):,} rows, "
        f"{setting.samples} samples a rank, Zipf {setting.zipf}; link of {rate_mbit:g} Mbit/s a node and direction; "
        f"{answer['runs']} runs; greedy by {answer['greedy'] or '-'}"
    )
    costs = answer["costs"]
    print(
        f"beside links a step takes {1e3 * costs['sums_seconds']:.1f} ms with answers by sums, "
        f"{1e3 * costs['copies_seconds']:.1f} ms with copies on every rank; rows at "
        f"{costs['row_bytes_per_second'] / 1e9:.2f} GB/s"
    )
    print(
        f"{'strategy':<26}{'between nodes':>14}{'step':>10}{'own / it':>10}{'unlimited':>11}{'own / it':>10}"
        f"{'processor':>11}   of the runs, least to most"
    )
    for name, row in answer["rows"].items():
        limited, unlimited = (
            "{:.0f} to {:.0f}".format(*(1e3 * each for each in row[f"{figure}_spread"]))
            for figure in ("step_seconds", "unlimited_step_seconds")
        )
        ratios = [f"{row[key]:.2f}" if key in row else "-" for key in ("own_over", "own_over_unlimited")]
        print(
            f"{name:<26}{row['inter_node_bytes'] / 1e6:>11.2f} MB{row['step_seconds'] * 1e3:>7.0f} ms{ratios[0]:>10}"
            f"{row['unlimited_step_seconds'] * 1e3:>8.0f} ms{ratios[1]:>10}{row['processor_seconds'] * 1e3:>8.0f} ms"
            f"   {limited}, {unlimited} ms"
        )
    for name, document in answer["plans"].items():
        if name in answer["rows"]:
            print(f"{name}: {kinds_of(document)}")
    for name, why in answer["lacks"].items():
        print(f"not run: {name}: {why}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, metavar="CSV", help="a list as TorchRec's published example")
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of a node's link, each direction")
    parser.add_argument("--samples", type=int, default=128, help="of a rank in a step")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="of each strategy, link and round")
    parser.add_argument("--runs", type=int, help="3 unless told; 1 with --quick")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="strategies")
    parser.add_argument(
        "--quick", action="store_true", help="32 samples, half of the tables, two steps; losses and bytes"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    exit_on_sigterm()
    quick, samples = arguments.quick, 32 if arguments.quick else arguments.samples
    listed = read_tables(arguments.tables) if arguments.tables else made_up_tables()
    setting = Setting(scaled(listed, 12 if quick else 24, samples), samples=samples)
    rounds, steps = (1, 2) if quick else (arguments.rounds, arguments.steps)
    try:
        answer = of_runs(
            [
                run_setting(setting, arguments.rate_mbit, rounds, steps, arguments.only)
                for _ in range(max(1, arguments.runs or (1 if quick else 3)))
            ]
        )
    except ClusterError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    show(answer, setting, arguments.rate_mbit)
    figures = {"rows": answer["rows"], "loss_differences": answer["loss_differences"]}
    return ending(figures, checks_of(answer, full_size=not quick), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
