"""The default settings, which measure and choose, beside every fixed choice, on an emulated cluster and under noise.

**cells**: two nodes of two ranks; Zipf 1.05 and 1.2, links of 50 and 200 Mbit/s and without limit, with and without a
dense part. In each cell a job with default settings trains until its tuner has measured, 1,000 steps at most. Then it
and the fixed arms train the same batches in turns; its ratio to the best of them is the median over the turns, with the
95 % interval by order statistics. TorchRec's row-wise sharding takes its turn where it is installed.

**changes**: one job while the link changes from 200 to 50 Mbit/s and then to none: steps until the choice is the arm
that is best there.

**noise**: simulated jobs of 5,000 steps with drift, bursts, a slow rank and steps of mixed sizes: wrong choices (arms
that take 2 % longer than the best) and steps lost.

The first two need root, ip, tc and setpriv; they say so and end well without. ``--quick``: one cell of small batches,
of which only is checked that arms are measured, and few simulated jobs.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from statistics import median
from typing import Any

import numpy as np

from tools.bench.cases.verify import interval
from tools.bench.harness import Outcome, at_least, at_most, check
from tools.bench.ranks import training_ranks
from tools.bench.sections.tuning_noise import NOISES, TIMES, noise, simulate
from tools.bench.strategies import Bench
from tools.bench.workloads import Setting

AUTO, PEER, FORMER = "flexd", "TorchRec row-wise", "chain"
FIXED = ("chain", "direct, dedup", "chain, prefetch pipeline", "direct, dedup, prefetch pipeline")
ARMS = dict(zip(("chain", "direct", "chain with prefetch", "direct with prefetch"), FIXED, strict=True))
"""By arm of the tuner, the strategy that has it fixed."""
SOON_STEPS, MOST_STEPS, TURN_STEPS = 500, 1_000, 6
NEAR_BEST, NEVER_SLOWER = 1.03, 1.02
FOLLOWS_STEPS = 1_500
PEER_TARGETS = {1.05: 2.1, 1.2: 2.5}
"""Steps of TorchRec over those of the default settings at 200 Mbit/s with a dense part, by exponent."""
WRONG, REGRET = 0.05, 0.015


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.05, 1.2])
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 200, 0], help="Mbit/s; 0: no limit")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each strategy in a cell")
    parser.add_argument("--jobs", type=int, default=100, help="simulated jobs of each kind")


class Job:
    """The default settings and the fixed arms in one cluster."""

    def __init__(self, bench: Bench, cluster: Any) -> None:
        self._bench, self._cluster = bench, cluster
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Make the job with default settings anew: what it measured elsewhere does not count."""
        self._bench.ask(60, "make", strategy=AUTO)

    def settle(self, *, dense: bool, most_steps: int = MOST_STEPS) -> dict[str, Any]:
        """Train until the tuner has measured. Return what it says, and the steps."""
        steps = 0
        told: dict[str, Any] = {"step": 0}
        while steps < most_steps and not told["step"]:
            self._bench.train(AUTO, dense=dense, steps=20)
            steps += 20
            told = self.tuning()
        return {"arm": told["arm"], "steps": steps, "explored_steps": told["explored_steps"]}

    def follow(self, best: str, *, dense: bool) -> int:
        """Return the steps until the arm is ``best`` and nothing is measured."""
        steps = 0
        while steps < FOLLOWS_STEPS:
            self._bench.train(AUTO, dense=dense, steps=20)
            steps += 20
            told = self.tuning()
            if told["arm"] == best and not told["measuring"]:
                break
        return steps

    def tuning(self) -> dict[str, Any]:
        found: dict[str, Any] = self._bench.ask(60, "tuning", strategy=AUTO)[0]
        return found

    def compare(self, rounds: int, *, dense: bool) -> dict[str, Any]:
        """Return the seconds of a step of each strategy, and ratios, all in turns."""
        names = [name for name in (AUTO, *FIXED, PEER) if name in self._bench.chosen]
        turns: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                # The first two steps of a turn fill what the turns of others have emptied.
                seconds, _ = self._bench.train(name, dense=dense, steps=TURN_STEPS + 2)
                turns[name].append(median(seconds[2:]))
            names.reverse()
        typical = {name: median(seconds) for name, seconds in turns.items()}
        best = min(FIXED, key=lambda name: typical[name])
        low, high = interval([mine / other for mine, other in zip(turns[AUTO], turns[best], strict=True)])
        found = {
            "step_ms": {name: 1000 * seconds for name, seconds in typical.items()},
            "best": best,
            "over_best": median([mine / other for mine, other in zip(turns[AUTO], turns[best], strict=True)]),
            "over_best_low": low,
            "over_best_high": high,
            "over_former_default": median(
                [mine / other for mine, other in zip(turns[AUTO], turns[FORMER], strict=True)]
            ),
        }
        if PEER in turns:
            found["peer_over_it"] = median([other / mine for mine, other in zip(turns[AUTO], turns[PEER], strict=True)])
        return found


def cells(options: Namespace) -> Outcome:
    figures: dict[str, Any] = {}
    checks = []
    zipfs, rates = options.zipf[: 1 if options.quick else None], options.rates[: 1 if options.quick else None]
    for zipf in zipfs:
        setting = Setting(zipf=zipf, samples=64, batches=4) if options.quick else Setting(zipf=zipf)
        with training_ranks("tools.bench.programs.cluster", setting) as (cluster, ranks):
            bench = Bench(cluster, ranks, 200.0, [AUTO] if options.quick else [AUTO, *FIXED, PEER])
            job = Job(bench, cluster)
            for rate in rates:
                cluster.limit(rate or None)
                for dense in (False, True)[: 1 if options.quick else None]:
                    cell = f"zipf {zipf:g}, {f'{rate:g} Mbit/s' if rate else 'no limit'}{', dense part' * dense}"
                    job.begin()
                    settled = job.settle(dense=dense, most_steps=40 if options.quick else MOST_STEPS)
                    if options.quick:
                        told = job.tuning()
                        figures[cell] = settled
                        checks.append(check(f"{cell}: measures", 1, "1", told["measuring"] or told["step"] > 0))
                        continue
                    found = figures[cell] = settled | job.compare(options.rounds, dense=dense)
                    print(cell, settled, {name: round(ms) for name, ms in found["step_ms"].items()}, flush=True)
                    checks.append(at_most(f"{cell}: it / the best fixed arm", found["over_best"], NEAR_BEST))
                    checks.append(at_most(f"{cell}: steps until it has chosen", settled["steps"], SOON_STEPS))
                    former = found["over_former_default"]
                    checks.append(at_most(f"{cell}: it / the former default", former, NEVER_SLOWER))
                    if rate == 200 and dense and "peer_over_it" in found and zipf in PEER_TARGETS:
                        peer = found["peer_over_it"]
                        checks.append(at_least(f"{cell}: TorchRec / it", peer, PEER_TARGETS[zipf]))
    return Outcome(figures, checks)


def changes(options: Namespace) -> Outcome:
    """The fixed arms, in short turns, say which arm is best after each change."""
    if options.quick:
        return Outcome({}, [])
    figures: dict[str, Any] = {}
    checks = []
    setting = Setting(zipf=options.zipf[-1])
    with training_ranks("tools.bench.programs.cluster", setting) as (cluster, ranks):
        bench = Bench(cluster, ranks, 200.0, [AUTO, *FIXED])
        job = Job(bench, cluster)
        job.begin()
        for rate in (200.0, 50.0, None):
            cluster.limit(rate)
            compared = job.compare(3, dense=False)
            best = next(arm for arm, name in ARMS.items() if name == compared["best"])
            steps = job.follow(best, dense=False)
            what = "no limit" if rate is None else f"{rate:g} Mbit/s"
            figures[what] = {"best": best, "steps": steps, "over_best": compared["over_best"]}
            checks.append(at_most(f"{what}: steps until the best arm is used", steps, FOLLOWS_STEPS - 1))
    return Outcome(figures, checks)


def simulated(options: Namespace) -> Outcome:
    jobs = 2 if options.quick else options.jobs
    figures: dict[str, Any] = {}
    checks = []
    for kind in NOISES:
        for name, times in TIMES.items():
            runs = [
                simulate(noise(kind, 5_000, np.random.default_rng(seed)), [times], seed=seed) for seed in range(jobs)
            ]
            found = figures[f"{kind}, {name}"] = {
                "wrong": float(np.mean([run.excess > 0.02 for run in runs])),
                "regret": float(np.mean([run.regret for run in runs])),
                "explored_steps": float(np.mean([run.explored_steps for run in runs])),
                "steps_until_measured": median([run.first_steps for run in runs]),
                "longest_slow_row": max(run.longest_slow_row for run in runs),
            }
            if options.quick:
                continue
            checks.append(at_most(f"{kind}, {name}: wrong choices", found["wrong"], WRONG))
            checks.append(at_most(f"{kind}, {name}: steps lost", found["regret"], REGRET))
    worst = max(found["longest_slow_row"] for found in figures.values())
    checks.append(at_most("steps in a row in an arm that is 10 % slower", worst, 16))
    return Outcome(figures, checks)


SECTIONS = {"noise": simulated, "cells": cells, "changes": changes}
