#!/usr/bin/env python3
"""Predicted against measured seconds of collectives, with prices as probed and as corrected by what steps report.

Two nodes of two ranks on an emulated cluster (tools/cluster.py), probed once. Training steps (chain, all rows at HOME)
report their phases to the daemon's ``LivePrices``; in the middle the link changes to a part of its rate, and the probe
is not repeated. Each report is predicted before it is learnt from. Then placements and exchanges are trained that the
corrections have not seen, and their communication is compared with the cost model's on both clusters.

Needs root, ip, tc and setpriv; says so and exits 0 without.

Usage: tools/bench_prices.py [--rate-mbit 50] [--changed 0.3] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench_model_rank import DIM, ROWS, Settings, Strategy, predict, share
from bench_report import check, ending
from cluster import Cluster as EmulatedCluster
from cluster import ClusterError, exit_on_sigterm, why_not
from cluster_ranks import Ranks

from flexd.config.planner import PlannerConfig
from flexd.control.protocol.report import PhaseReport, StepReport
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.operations.live_prices import MIN_SECONDS, MIN_STEPS, LivePrices
from flexd.operations.price_samples import phase_values, price_samples
from flexd.planner.model.row_bytes import Exchange
from flexd.topology.cluster import Cluster
from flexd.topology.files import load_cluster

RANK_PROGRAM = Path(__file__).parent / "bench_prices_rank.py"
LAYOUT = RankLayout(2, 2)
NODE_ROWS = 2000
UNSEEN = {
    "chain, 2000 rows NODE": ("chain", NODE_ROWS, Exchange.CHAIN),
    "direct, dedup": ("direct", 0, Exchange.DIRECT_DEDUP),
}
"""Exchange and copies that the corrections have not seen."""
NO_WORSE, BETTER = 1.05, 0.5
"""Largest error of corrected prices over that of probed ones where the probe holds, and where the link has changed."""


@dataclass
class Errors:
    """Seconds summed over the turns of one part of the run."""

    measured: float = 0.0
    probed: float = 0.0
    used: float = 0.0
    by_turn: list[tuple[float, float]] = field(default_factory=list)

    def add(self, measured: float, probed: float, used: float) -> None:
        self.measured += measured
        self.probed += probed
        self.used += used
        self.by_turn.append((probed / measured, used / measured))

    def shares(self) -> dict[str, float]:
        return {"as_probed": self.probed / self.measured, "in_use": self.used / self.measured}


class Bench:
    """One run on one emulated cluster. A turn has as many training steps as are learnt from at once."""

    def __init__(self, ranks: Ranks, topology: Path, settings: Settings) -> None:
        self._ranks, self._settings = ranks, settings
        self._steps = MIN_STEPS
        ranks.ask({"ask": "probe", "file": str(topology)}, 60 + 2 * settings.probe_seconds)
        self.probed = load_cluster(topology)
        live = SimpleNamespace(generation=1, layout=LAYOUT)
        self.prices = LivePrices(
            PlannerConfig(correct_prices=True), KeySpace([TableSpec("item", ROWS, DIM)]), self.probed,
            SimpleNamespace(exposed=lambda: None), SimpleNamespace(live=lambda: live),  # type: ignore[arg-type]
        )  # fmt: skip

    def begin(self, exchange: str, node_rows: int = 0) -> None:
        self._ranks.ask({"ask": "begin", "exchange": exchange, "node_rows": node_rows}, 120)

    def turn(self, exchange: str) -> list[StepReport]:
        """Train, and return the report of each rank."""
        answers = self._ranks.ask({"ask": "train", "steps": self._steps}, 120)
        step_seconds = float(np.mean([answer["seconds"] / answer["steps"] for answer in answers]))
        self._steps = max(MIN_STEPS, math.ceil(1.1 * MIN_SECONDS / step_seconds))
        return [
            StepReport(
                step=1, steps=answer["steps"], placement_version=0, placement_digest=0, step_seconds=answer["seconds"],
                apply_seconds=0.0, accesses_by_tier=(0, 0, 0), exchange=exchange, phase_steps=answer["steps"],
                phases=tuple(PhaseReport(**phase) for phase in answer["phases"]),
            )
            for answer in answers
        ]  # fmt: skip

    def learn(self, turns: int) -> dict[str, Errors]:
        """Train turns of the chain: predict each by probed and corrected prices, and learn from it."""
        errors: dict[str, Errors] = {}
        for _ in range(turns):
            reports = self.turn("chain")
            known = self.prices.corrections()
            for curve, sample in self._samples(reports, "chain").items():
                factors = known[curve].factors if curve in known else (1.0, 1.0)
                used = factors[0] * sample.latency_seconds + factors[1] * sample.transfer_seconds
                measured = sample.measured_seconds
                probed = sample.latency_seconds + sample.transfer_seconds
                errors.setdefault(curve.value, Errors()).add(
                    float(measured.sum()), float(abs(measured - probed).sum()), float(abs(measured - used).sum())
                )
            for rank, report in enumerate(reports):
                self.prices.add(rank, report)
        return errors

    def unseen(self, name: str, turns: int) -> dict[str, float]:
        """Return the seconds of communication of a step: measured, and by the cost model on both clusters."""
        exchange, node_rows, priced = UNSEEN[name]
        self.begin(exchange, node_rows)
        measured = [
            sum(
                float(sample.measured_seconds.sum()) for sample in self._samples(self.turn(exchange), exchange).values()
            )
            for _ in range(turns)
        ]
        hot = np.argsort(-share(self._settings), kind="stable")[:node_rows].astype(np.int64)
        placement = Placement.of(hot, np.full(node_rows, Tier.NODE, np.uint8), 0)
        seconds = float(np.median(measured))
        found = {"measured_seconds": seconds}
        for which, cluster in (("as_probed", self.probed), ("corrected", self.prices.cluster)):
            predicted = self._predict(Strategy(name, exchange, priced, placement), cluster)
            found |= {f"{which}_seconds": predicted, f"{which}_error": predicted / seconds - 1}
        return found

    def _predict(self, strategy: Strategy, cluster: Cluster) -> float:
        return float(predict(strategy, self._settings, LAYOUT, cluster).exposed_seconds)

    def _samples(self, reports: list[StepReport], exchange: str) -> dict[Any, Any]:
        values = np.stack([phase_values(report) / report.phase_steps for report in reports])
        priced = self.probed.of_layout(LAYOUT.nodes, LAYOUT.local_ranks)
        return price_samples(values, LAYOUT, priced, exchange, all_reduces=True)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    quick = arguments.quick
    settings = Settings(
        probe_seconds=5.0 if quick else 40.0, probe_bytes=2**19 if quick else 2**21, accesses=2048, zipf=1.05, steps=0
    )
    turns, settle = (9, 7) if quick else (40, 20)
    answer: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-prices-") as directory,
        EmulatedCluster(2, 2, adapters=2, rate_mbit=arguments.rate_mbit) as emulated,
        Ranks(
            emulated, [sys.executable, str(RANK_PROGRAM), json.dumps(asdict(settings))],
            environment={"OMP_NUM_THREADS": "1"},
        ) as ranks,
    ):  # fmt: skip
        bench = Bench(ranks, Path(directory) / "probed.yaml", settings)
        bench.begin("chain")
        answer["link as probed"] = bench.learn(turns)
        answer["prices as probed"] = bench.prices.cluster.name
        emulated.limit(arguments.rate_mbit * arguments.changed)
        answer["link changed: adapting"] = bench.learn(settle)
        answer["link changed: learnt"] = bench.learn(turns)
        answer["prices changed"] = bench.prices.cluster.name
        answer["reasons"] = {curve.value: known.reason() for curve, known in bench.prices.corrections().items()}
        answer["unseen"] = {name: bench.unseen(name, turns // 4) for name in UNSEEN}
    return answer


PARTS = ("link as probed", "link changed: adapting", "link changed: learnt")


def show(answer: dict[str, Any]) -> None:
    print(f"{'part':<26}{'curve':<20}{'turns':>6}{'measured':>12}{'as probed':>11}{'in use':>8}")
    for part in PARTS:
        for curve, errors in answer[part].items():
            shares, turns = errors.shares(), len(errors.by_turn)
            print(
                f"{part:<26}{curve:<20}{turns:>6}{1e3 * errors.measured / turns:>9.2f} ms"
                f"{shares['as_probed']:>11.1%}{shares['in_use']:>8.1%}"
            )
    print("errors: sum of |predicted - measured| of the phases over what was measured; in use: prices before each turn")
    for name, found in answer["unseen"].items():
        print(f"{name:<26}measured {1e3 * found['measured_seconds']:.1f} ms", end="")
        for which in ("as_probed", "corrected"):
            words, seconds = which.replace("_", " "), found[f"{which}_seconds"]
            print(f", {words} {1e3 * seconds:.1f} ms ({found[f'{which}_error']:+.1%})", end="")
        print()
    for curve, reason in answer["reasons"].items():
        print(f"{curve:<20}{reason}")


def checks_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Corrected prices are no worse where the probe holds, better where it does not, and on what they have not seen."""
    checks = []
    for part in PARTS:
        for curve, errors in answer[part].items():
            ratio = errors.used / errors.probed
            most = BETTER if part == PARTS[-1] and curve.startswith("inter") else NO_WORSE
            checks.append(check(f"{part}: {curve}: error in use / as probed", ratio, f"<= {most}", ratio <= most))
    for name, found in answer["unseen"].items():
        ratio = abs(found["corrected_error"]) / abs(found["as_probed_error"])
        checks.append(check(f"{name}: error corrected / as probed", ratio, f"<= {BETTER}", ratio <= BETTER))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, default=50.0, help="of a rank's adapter, each direction")
    parser.add_argument("--changed", type=float, default=0.3, help="rate after the change, as a share")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    exit_on_sigterm()
    try:
        answer = run(arguments)
    except ClusterError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    show(answer)
    figures = {part: {curve: errors.shares() for curve, errors in answer[part].items()} for part in PARTS}
    return ending({**figures, "unseen": answer["unseen"]}, checks_of(answer), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
