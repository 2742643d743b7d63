#!/usr/bin/env python3
"""Exchange strategies on an emulated cluster, beside TorchRec: bytes by link, step time, exposed communication.

Two nodes of two ranks, joined by a slow link (tools/cluster.py). All strategies are trained by the same processes on
the same batches from the same initial values with the same optimizer (row-wise Adagrad, summed gradients), in turns,
with the link limited and unlimited; their losses must agree. Bytes are those of the interface counters, headers
included. The *exposed* communication time is the median step time less that on the unlimited link; beside it the same
of the lower deciles, the steps that other work on the machine disturbed least, and the time that the bytes take on
the wire alone. With and without a dense part, behind
which communication can hide. Memory is what the largest rank stores between steps.

With ``--runs`` above 1 (3 unless told, 1 with ``--quick``) everything is made anew as often: figures are medians over
the runs, with the least and the most of any run beside them.

The bound is that of exact synchronous training on the same batches: each node fetches and pushes each row it touches
and does not home once a step (rows only, no ids, no headers).

Needs root, ip, tc and setpriv; says so and exits 0 without. Without TorchRec (``make torchrec``) its rows are missing.

Usage: tools/bench_cluster.py [--quick] [--json] [--zipf 1.05 1.2] [--rate-mbit 200] [--only NAME ...]
       [--runs 3] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_cluster_data import Setting, bounds
from bench_cluster_plot import plot_steps
from bench_cluster_runs import median_answer
from bench_report import check, ending
from cluster import Cluster, ClusterError, LinkBytes, exit_on_sigterm, why_not
from cluster_ranks import Ranks

RANK_PROGRAM = Path(__file__).parent / "bench_cluster_rank.py"
ROW_WISE, DEDUP = "TorchRec row-wise", "direct, dedup"
WARM_UP = 3
"""Steps of each strategy before anything is measured; the first applies the plan."""
START_SECONDS, STEP_SECONDS = 240.0, 10.0
"""Deadlines: of everything before the first step, and of a step."""
LOSS_TOLERANCE, NARROW_LOSS_TOLERANCE = 2e-3, 2e-2
TARGETS = {
    1.05: {"reduction": 0.66, "exposed": 3.0, "run-ahead": 7.0},
    1.2: {"reduction": 0.80, "exposed": 5.0, "run-ahead": 12.0},
}
RUN_AHEAD_AGAINST_DEDUP = 2.5
BOUND_TARGET, SMALL_BOUND_TARGET, CPU_TARGET = 1.05, 1.1, 1.3
"""Bytes over the bound: of the full batch, and of ``--quick``, where sizes and bit masks weigh more."""


@dataclass(frozen=True)
class Effort:
    rounds: int
    steps: int
    """Measured of each strategy, link and round; one more before them is not."""


@dataclass
class StrategySamples:
    """Samples of one strategy and dense part: seconds by step, bytes by step, losses of all its steps."""

    limited: list[float] = field(default_factory=list)
    unlimited: list[float] = field(default_factory=list)
    inter_bytes: list[float] = field(default_factory=list)
    intra_bytes: list[float] = field(default_factory=list)

    def figures(self, bound: float, link_bytes_per_second: float) -> dict[str, float]:
        """``link_bytes_per_second``: of all nodes together, in one direction."""
        return {
            "inter_node_bytes": median(self.inter_bytes),
            "wire_seconds": median(self.inter_bytes) / link_bytes_per_second,
            "intra_node_bytes": median(self.intra_bytes),
            "inter_node_bytes_over_bound": median(self.inter_bytes) / bound,
            "step_seconds": median(self.limited),
            "step_seconds_p99": float(np.percentile(self.limited, 99)),
            "unlimited_step_seconds": median(self.unlimited),
            "exposed_seconds": median(self.limited) - median(self.unlimited),
            # Other work on the machine only ever slows a step down.
            "exposed_seconds_p10": float(np.percentile(self.limited, 10) - np.percentile(self.unlimited, 10)),
            "unlimited_step_seconds_p10": float(np.percentile(self.unlimited, 10)),
        }


class Bench:
    """One setting. ``losses``: by strategy, the mean over the ranks of each step since it was made."""

    def __init__(self, cluster: Cluster, ranks: Ranks, setting: Setting, rate_mbit: float) -> None:
        self._cluster, self._ranks, self._rate = cluster, ranks, rate_mbit
        self.prepared = self._ask(START_SECONDS, "prepare", rate_mbit=rate_mbit)
        self.losses: dict[str, list[float]] = {}
        self.setting = setting

    def _ask(self, seconds: float, name: str, **arguments: Any) -> Any:
        return self._ranks.ask({"ask": name, **arguments}, seconds)[0]

    def make(self, strategies: Sequence[str]) -> None:
        self._cluster.limit(None)
        for name in strategies:
            self._ask(START_SECONDS, "make", strategy=name)
            self.train(name, dense=False, steps=WARM_UP)
            planned = 1 if name.startswith("tiers") and self.prepared["replicated_rows"] else 0
            if self._ask(STEP_SECONDS, "placement_version", strategy=name) != planned:
                raise ClusterError(f"{name}: the placement is not the planned one")

    def train(self, strategy: str, *, dense: bool, steps: int) -> list[float]:
        """Seconds of each step, the mean over the ranks."""
        answers = self._ranks.ask(
            {"ask": "train", "strategy": strategy, "dense": dense, "steps": steps}, 60 + STEP_SECONDS * steps
        )
        self.losses.setdefault(strategy, []).extend(np.mean([a["losses"] for a in answers], axis=0).tolist())
        return list(np.mean([a["seconds"] for a in answers], axis=0))

    def stored_bytes(self, strategy: str) -> int:
        """Of the rank that stores most."""
        return max(self._ranks.ask({"ask": "stored_bytes", "strategy": strategy}, STEP_SECONDS))

    def dense_seconds(self) -> float:
        self._cluster.limit(None)
        return median(np.mean(self._ranks.ask({"ask": "dense_seconds", "steps": 5}, 120), axis=0))

    def measure(self, strategies: Sequence[str], *, dense: bool, effort: Effort) -> dict[str, StrategySamples]:
        """In turns, so that what else the machine does falls on all alike."""
        measured = {name: StrategySamples() for name in strategies}
        for _ in range(effort.rounds):
            for name in strategies:
                result = measured[name]
                self._cluster.limit(self._rate)
                before = self._cluster.sent()
                result.limited += self.train(name, dense=dense, steps=effort.steps + 1)[1:]
                sent: LinkBytes = self._cluster.sent() - before
                result.inter_bytes.append(sent.inter / (effort.steps + 1))
                result.intra_bytes.append(sent.intra / (effort.steps + 1))
                self._cluster.limit(None)
                result.unlimited += self.train(name, dense=dense, steps=effort.steps + 1)[1:]
        return measured

    def loss_differences(self) -> dict[str, float]:
        """By strategy: the largest relative difference to the direct exchange without dedup at any step."""
        first = self.losses.get("direct, no dedup") or next(iter(self.losses.values()))
        return {
            name: float(np.max(np.abs(np.array(losses) / np.array(first) - 1))) for name, losses in self.losses.items()
        }


def run_setting(setting: Setting, rate_mbit: float, effort: Effort, only: Sequence[str] | None) -> dict[str, Any]:
    """All figures of one setting."""
    command = [sys.executable, str(RANK_PROGRAM), json.dumps(asdict(setting))]
    with (
        # 64 KiB is what the kernel hands to a link at once; a smaller burst would cut it up on the processors that the
        # ranks need.
        Cluster(setting.nodes, setting.local_ranks, burst_kib=64, mtu=9000) as cluster,
        Ranks(cluster, command, environment={"OMP_NUM_THREADS": "1"}) as ranks,
    ):
        bench = Bench(cluster, ranks, setting, rate_mbit)
        lacks = bench.prepared["strategies"]
        chosen = [name for name, why in lacks.items() if why is None and (only is None or name in only)]
        bench.make(chosen)
        bound = bounds(setting)
        dense_seconds = bench.dense_seconds()
        parts = {}
        for dense, title in ((False, "no dense part"), (True, "dense part")):
            measured = bench.measure(chosen, dense=dense, effort=effort)
            links = rate_mbit * 1e6 / 8 * setting.nodes
            parts[title] = {name: result.figures(bound.volume, links) for name, result in measured.items()}
            if (row_wise := parts[title].get(ROW_WISE)) is not None:
                for row in parts[title].values():
                    row["row_wise_over_exposed"] = _ratio(row_wise["exposed_seconds"], row["exposed_seconds"])
        return {
            "zipf": setting.zipf,
            "bound_bytes": bound.volume,
            "between_steps_bytes": bound.between_steps,
            "dense_seconds": dense_seconds,
            "replicated_rows": bench.prepared["replicated_rows"],
            "lacks": {name: why for name, why in lacks.items() if why is not None},
            "loss_differences": bench.loss_differences(),
            "stored_bytes": {name: bench.stored_bytes(name) for name in chosen},
            "parts": parts,
        }


def checks_of(answer: dict[str, Any], *, full_size: bool) -> list[dict[str, Any]]:
    """``full_size``: the setting that the targets were set for; otherwise only bytes against the bound, and losses."""
    label = f"zipf {answer['zipf']}"
    checks = []
    for name, difference in answer["loss_differences"].items():
        limit = NARROW_LOSS_TOLERANCE if name.endswith("16") else LOSS_TOLERANCE
        checks.append(check(f"{label}: {name}: losses differ by", difference, f"<= {limit}", difference <= limit))
    targets = TARGETS.get(answer["zipf"]) if full_size else None
    for title, rows in answer["parts"].items():
        prefix = f"{label}, {title}"
        row_wise, dedup = rows.get(ROW_WISE), rows.get(DEDUP)
        for name, row in rows.items():
            if not name.startswith(("chain", "tiers")) or name.endswith("16"):
                continue
            over = row["inter_node_bytes_over_bound"]
            limit = BOUND_TARGET if full_size else SMALL_BOUND_TARGET
            checks.append(check(f"{prefix}: {name}: bytes / bound", over, f"<= {limit}", over <= limit))
            if targets is None or row_wise is None:
                continue
            saved = 1 - row["inter_node_bytes"] / row_wise["inter_node_bytes"]
            goal = targets["reduction"]
            checks.append(check(f"{prefix}: {name}: bytes below row-wise", saved, f">= {goal}", saved >= goal))
            ahead = "run-ahead" in name
            goal = targets["run-ahead" if ahead else "exposed"]
            ratio = row["row_wise_over_exposed"]
            checks.append(check(f"{prefix}: {name}: exposed, row-wise over it", ratio, f">= {goal}", ratio >= goal))
            if ahead and dedup is not None:
                goal = RUN_AHEAD_AGAINST_DEDUP
                ratio = _ratio(dedup["exposed_seconds"], row["exposed_seconds"])
                checks.append(check(f"{prefix}: {name}: exposed, dedup over it", ratio, f">= {goal}", ratio >= goal))
        if full_size and row_wise is not None and "chain" in rows:
            ratio = rows["chain"]["unlimited_step_seconds"] / row_wise["unlimited_step_seconds"]
            name = f"{prefix}: chain: step on an unlimited link / TorchRec row-wise"
            checks.append(check(name, ratio, f"<= {CPU_TARGET}", ratio <= CPU_TARGET))
    return checks


def _ratio(of: float, to: float) -> float:
    """Nothing exposed counts as a thousandth of what it is compared with."""
    return of / max(to, of / 1000)


def show(answer: dict[str, Any], rate_mbit: float) -> None:
    print(
        f"\nZipf {answer['zipf']}: bound {answer['bound_bytes'] / 1e6:.2f} MB a step, of which "
        f"{answer['between_steps_bytes'] / 1e6:.2f} MB between two steps whatever is done ahead; the plan replicates "
        f"{answer['replicated_rows']:,} rows; the dense part alone takes {answer['dense_seconds'] * 1e3:.0f} ms; "
        f"{answer['runs']} runs"
    )
    for title, rows in answer["parts"].items():
        print(f"\n{title}; link of {rate_mbit:g} Mbit/s a node and direction; bytes of all nodes a step")
        print(
            f"{'strategy':<26}{'inter-node':>12}{'/ bound':>9}{'wire':>9}{'intra-node':>12}{'step':>10}{'p99':>10}"
            f"{'unlimited':>11}{'exposed':>10}{'row-wise / it':>15}{'p10':>9}{'row-wise / it':>15}"
        )
        base = rows.get(ROW_WISE)
        for name, row in rows.items():
            ratio, p10 = (
                f"{_ratio(base[key], row[key]):.1f}" if base else "-"
                for key in ("exposed_seconds", "exposed_seconds_p10")
            )
            print(
                f"{name:<26}{row['inter_node_bytes'] / 1e6:>9.2f} MB{row['inter_node_bytes_over_bound']:>9.3f}"
                f"{row['wire_seconds'] * 1e3:>6.0f} ms"
                f"{row['intra_node_bytes'] / 1e6:>9.2f} MB{row['step_seconds'] * 1e3:>7.0f} ms"
                f"{row['step_seconds_p99'] * 1e3:>7.0f} ms{row['unlimited_step_seconds'] * 1e3:>8.0f} ms"
                f"{row['exposed_seconds'] * 1e3:>7.0f} ms{ratio:>15}"
                f"{row['exposed_seconds_p10'] * 1e3:>6.0f} ms{p10:>15}"
            )
        if answer["runs"] > 1:
            print(f"of {answer['runs']} runs: least to most")
            for name, row in rows.items():
                print(f"{name:<26}{_spread_words(row['spread'])}")
    print("\nmemory of the largest rank between steps")
    for name, stored in answer["stored_bytes"].items():
        print(f"{name:<26}{stored / 1e6:>9.1f} MB")
    for name, why in answer["lacks"].items():
        print(f"not run: {name}: {why}")


def _spread_words(spread: dict[str, list[float]]) -> str:
    words = [
        f"{figure.removesuffix('_seconds').replace('_', ' ')} {least * 1e3:.0f} to {most * 1e3:.0f} ms"
        for figure, (least, most) in spread.items()
        if figure.endswith("_seconds")
    ]
    if "row_wise_over_exposed" in spread:
        words.append("row-wise / exposed {:.1f} to {:.1f}".format(*spread["row_wise_over_exposed"]))
    return "; ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.05, 1.2])
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of a node's link, each direction")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of each strategy, link and round")
    parser.add_argument("--runs", type=int, help="3 unless told; 1 with --quick")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="strategies")
    parser.add_argument("--quick", action="store_true", help="an eighth of the batch, two steps; bytes and losses only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="a picture of the step times with a dense part")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    exit_on_sigterm()
    effort = Effort(arguments.rounds, arguments.steps)
    settings = [Setting(zipf=zipf) for zipf in arguments.zipf]
    if arguments.quick:
        effort = Effort(rounds=1, steps=2)
        settings = [Setting(zipf=arguments.zipf[0], samples=64, batches=4)]
    runs = max(1, arguments.runs or (1 if arguments.quick else 3))
    answers = []
    for setting in settings:
        try:
            of_runs = [run_setting(setting, arguments.rate_mbit, effort, arguments.only) for _ in range(runs)]
            answers.append(median_answer(of_runs))
        except ClusterError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
        show(answers[-1], arguments.rate_mbit)
    if arguments.plot is not None:
        plot_steps(answers, arguments.rate_mbit, arguments.plot)
    checks = [entry for answer in answers for entry in checks_of(answer, full_size=not arguments.quick)]
    return ending(answers, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
