"""Strategies trained by the same ranks on the same batches, in turns, with the link limited and unlimited."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from tools.bench.cluster import Cluster
from tools.bench.ranks import Ranks

WARM_UP = 3
"""Steps of each strategy before anything is measured; the first applies the plan."""
START_SECONDS, STEP_SECONDS = 240.0, 10.0
"""Deadlines: of everything before the first step, and of a step."""
SPREAD_OF = ("step_seconds", "unlimited_step_seconds", "exposed_seconds")


@dataclass(frozen=True)
class Effort:
    """Times that everything is made anew, rounds of each, and steps of each strategy, link and round.

    One more step before those is not measured.
    """

    runs: int
    rounds: int
    steps: int

    @classmethod
    def of(cls, options: Namespace) -> Effort:
        if options.quick:
            return cls(1, 1, 2)
        return cls(options.runs, options.rounds, options.steps)


def arguments(parser: ArgumentParser, rounds: int, steps: int) -> None:
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of a node's link, each direction")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps, help="of each strategy, link and round")
    parser.add_argument("--runs", type=int, default=3, help="everything is made anew as often; figures are medians")
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="all that this machine has unless given")


@dataclass
class Samples:
    """Samples of one strategy: seconds by step; bytes and processor seconds per step by round."""

    limited: list[float] = field(default_factory=list)
    unlimited: list[float] = field(default_factory=list)
    inter_bytes: list[float] = field(default_factory=list)
    intra_bytes: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "inter_node_bytes": median(self.inter_bytes),
            "intra_node_bytes": median(self.intra_bytes),
            "step_seconds": median(self.limited),
            "step_seconds_p99": float(np.percentile(self.limited, 99)),
            "unlimited_step_seconds": median(self.unlimited),
            "exposed_seconds": median(self.limited) - median(self.unlimited),
            # Other work on the machine only ever slows a step down.
            "exposed_seconds_p10": float(np.percentile(self.limited, 10) - np.percentile(self.unlimited, 10)),
            "unlimited_step_seconds_p10": float(np.percentile(self.unlimited, 10)),
            "processor_seconds": median(self.processor),
        }


class Bench:
    """Ranks of one setting, started and prepared.

    Attributes:
        prepared: answer of rank 0 to "prepare".
        chosen: strategies that run here.
        losses: by strategy, the mean over the ranks of each step since it was made.
        arms: of the newest steps, as the tuner of rank 0 calls them.
    """

    def __init__(self, cluster: Cluster, ranks: Ranks, rate_mbit: float, wanted: Sequence[str] | None) -> None:
        self._cluster, self._rate, self.ask = cluster, rate_mbit, ranks.ask
        cluster.limit(None)
        self.prepared = self.ask(START_SECONDS, "prepare", rate_mbit=rate_mbit)[0]
        lacks = self.prepared["strategies"]
        self.chosen = [name for name, why in lacks.items() if why is None and (wanted is None or name in wanted)]
        self.losses: dict[str, list[float]] = {}
        self.arms: list[str] = []
        for name, why in lacks.items():
            if why is not None:
                print(f"not run: {name}: {why}")
        for name in self.chosen:
            self.ask(START_SECONDS, "make", strategy=name)
            self.train(name, dense=False, steps=WARM_UP)

    def train(self, strategy: str, *, dense: bool, steps: int) -> tuple[list[float], float]:
        """Return seconds of each step and processor seconds per step, means over the ranks."""
        answers = self.ask(60 + STEP_SECONDS * steps, "train", strategy=strategy, dense=dense, steps=steps)
        self.losses.setdefault(strategy, []).extend(np.mean([a["losses"] for a in answers], axis=0).tolist())
        self.arms = answers[0].get("arms", [])
        used = float(np.mean([a["processor_seconds"] for a in answers]))
        return list(np.mean([a["seconds"] for a in answers], axis=0)), used

    def measure(self, effort: Effort, *, dense: bool) -> dict[str, dict[str, float]]:
        """Return figures by strategy, trained in turns, so that what else the machine does falls on all alike."""
        samples = {name: Samples() for name in self.chosen}
        for _ in range(effort.rounds):
            for name, result in samples.items():
                self._cluster.limit(self._rate)
                before = self._cluster.sent()
                # The first step after a change of the link is not counted.
                result.limited += self.train(name, dense=dense, steps=effort.steps + 1)[0][1:]
                sent = self._cluster.sent() - before
                result.inter_bytes.append(sent.inter / (effort.steps + 1))
                result.intra_bytes.append(sent.intra / (effort.steps + 1))
                self._cluster.limit(None)
                seconds, used = self.train(name, dense=dense, steps=effort.steps + 1)
                result.unlimited += seconds[1:]
                result.processor.append(used)
        return {name: result.figures() for name, result in samples.items()}

    def loss_differences(self) -> dict[str, float]:
        """By strategy: the largest relative difference to the first strategy at any step."""
        first = np.array(next(iter(self.losses.values())))
        return {name: float(np.max(np.abs(np.array(losses) / first - 1))) for name, losses in self.losses.items()}
