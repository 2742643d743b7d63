"""The default settings, which measure and choose, beside every fixed choice, on an emulated cluster and under noise.

**cells**: two nodes of two ranks; Zipf 1.05 and 1.2, links of 50 and 200 Mbit/s and without limit, with and without a
dense part. In each cell a job with default settings trains until its tuner has measured, 1,000 steps at most. Then it
and the fixed arms train the same batches in turns; its ratio to the best of them is the median over the turns, with the
95 % interval by order statistics. TorchRec's row-wise sharding, where it is installed, and copies of the 5 % hottest
rows take their turns.

**changes**: one job while the link changes from 200 to 50 Mbit/s and to none, and then another process takes a
processor: steps until it has measured anew, and its step beside the fixed arms'.

**noise**: simulated jobs of 5,000 steps with drift, bursts, a slow rank and steps of mixed sizes: wrong choices (arms
that take 2 % longer than the best) and steps lost.

The first two need root, ip, tc and setpriv; they say so and end well without. ``--quick``: one cell of small batches,
of which only is checked that arms are measured, and few simulated jobs.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tools.bench.cases.verify import interval
from tools.bench.cluster import Cluster
from tools.bench.harness import Outcome, at_least, at_most, check
from tools.bench.ranks import training_ranks
from tools.bench.sections.choice_plot import Drawn, plot_choices
from tools.bench.sections.tuning_noise import NOISES, TIMES, noise, simulate
from tools.bench.strategies import Bench
from tools.bench.workloads import Setting

AUTO, PEER, FORMER, COPIES = "flexd", "TorchRec row-wise", "chain", "tiers, prefetch pipeline"
FIXED = ("chain", "direct, dedup", "chain, prefetch pipeline", "direct, dedup, prefetch pipeline")
SOON_STEPS, MOST_STEPS, TURN_STEPS, SHOWN_STEPS = 500, 1_000, 6, 60
NEAR_BEST, NEVER_SLOWER = 1.03, 1.02
FOLLOWS_STEPS = 1_500
PEER_TARGETS = {1.05: 2.1, 1.2: 2.5}
"""Steps of TorchRec over those of the default settings at 200 Mbit/s with a dense part, by exponent."""
WRONG, REGRET = 0.05, 0.015


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.05, 1.2])
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 200, 0], help="Mbit/s; 0: no limit")
    parser.add_argument("--parts", nargs="+", choices=("none", "dense"), default=["none", "dense"])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each strategy in a cell")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the steps of each job (matplotlib)")
    parser.add_argument("--jobs", type=int, default=100, help="simulated jobs of each kind")


class Job:
    """The default settings and the fixed arms in one cluster.

    Attributes:
        drawn: seconds and arm of each step with default settings before the comparison.
    """

    def __init__(self, bench: Bench, cluster: Cluster) -> None:
        self._bench, self._cluster = bench, cluster
        self.drawn: Drawn = []
        bench.ask(60, "make", strategy=AUTO)  # anew: what it measured elsewhere does not count

    def train_until(self, done: Callable[[dict[str, Any]], bool], most_steps: int, *, dense: bool) -> dict[str, Any]:
        """Train the job with default settings; return the steps, and its tuning."""
        steps, told = 0, self.tuning()
        while steps < most_steps and not done(told):
            seconds, _ = self._bench.train(AUTO, dense=dense, steps=20)
            self.drawn += zip(seconds, self._bench.arms, strict=True)
            steps, told = steps + 20, self.tuning()
        return {"steps": steps, **{name: told[name] for name in ("arm", "explored_steps", "measuring")}}

    def tuning(self) -> dict[str, Any]:
        found: dict[str, Any] = self._bench.ask(60, "tuning", strategy=AUTO)[0]
        return found

    def compare(self, rounds: int, *, dense: bool) -> dict[str, Any]:
        """Return the milliseconds of a step of each strategy, ratios, bytes and memory, all in turns."""
        names = [name for name in (AUTO, *FIXED, COPIES, PEER) if name in self._bench.chosen]
        turns: dict[str, list[float]] = {name: [] for name in names}
        sent, order = dict.fromkeys(names, 0.0), np.random.default_rng(0)
        for _ in range(rounds):
            for name in names:
                before = self._cluster.sent()
                # The first two steps of a turn fill what the turns of others have emptied.
                seconds, _ = self._bench.train(name, dense=dense, steps=TURN_STEPS + 2)
                turns[name].append(median(seconds[2:]))
                sent[name] += (self._cluster.sent() - before).inter / (TURN_STEPS + 2) / rounds
            order.shuffle(names)  # what comes before a turn is felt in it

        def over(other: str) -> list[float]:
            return [mine / its for mine, its in zip(turns[AUTO], turns[other], strict=True)]

        best = min(FIXED, key=lambda name: median(turns[name]))
        low, high = interval(over(best))
        return {
            "step_ms": {name: 1000 * median(seconds) for name, seconds in turns.items()}, "best": best,
            "over_best": median(over(best)), "over_best_low": low, "over_best_high": high,
            "over_former_default": median(over(FORMER)), "inter_node_bytes": sent,
            "stored_bytes": {name: max(self._bench.ask(60, "stored_bytes", strategy=name)) for name in names},
            **({"peer_over_it": 1 / median(over(PEER))} if PEER in turns else {}),
        }  # fmt: skip


def cells(options: Namespace) -> Outcome:
    figures: dict[str, Any] = {}
    checks = []
    drawn: dict[str, tuple[Drawn, dict[str, float]]] = {}
    few = 1 if options.quick else None
    for zipf in options.zipf[:few]:
        setting = Setting(zipf=zipf, samples=64, batches=4) if options.quick else Setting(zipf=zipf)
        with training_ranks("tools.bench.programs.cluster", setting) as (cluster, ranks):
            bench = Bench(cluster, ranks, 200.0, [AUTO] if options.quick else [AUTO, *FIXED, COPIES, PEER])
            for rate, part in product(options.rates[:few], options.parts[:few]):
                dense = part == "dense"
                cluster.limit(rate or None)
                cell = f"zipf {zipf:g}, {f'{rate:g} Mbit/s' if rate else 'no limit'}{', dense part' * dense}"
                job = Job(bench, cluster)
                settled = job.train_until(
                    lambda told: told["step"] > 0, 40 if options.quick else MOST_STEPS, dense=dense
                )
                figures[cell] = settled
                if options.quick:
                    checks.append(check(f"{cell}: measures", 1, "1", settled["measuring"]))
                    continue
                job.train_until(lambda told: False, SHOWN_STEPS, dense=dense)
                found = figures[cell] = settled | job.compare(options.rounds, dense=dense)
                taken, lines = found["step_ms"], {"TorchRec row-wise": PEER, "the former default": FORMER}
                if rate:
                    drawn[cell] = (job.drawn, {line: taken[name] for line, name in lines.items() if name in taken})
                print(cell, settled, {name: round(ms) for name, ms in taken.items()}, flush=True)
                checks.append(at_most(f"{cell}: it / the best fixed arm", found["over_best"], NEAR_BEST))
                checks.append(at_most(f"{cell}: it / the former default", found["over_former_default"], NEVER_SLOWER))
                checks.append(at_most(f"{cell}: steps until it has chosen", settled["steps"], SOON_STEPS))
                if rate == 200 and dense and "peer_over_it" in found and zipf in PEER_TARGETS:
                    checks.append(at_least(f"{cell}: TorchRec / it", found["peer_over_it"], PEER_TARGETS[zipf]))
    if options.plot and drawn:
        plot_choices(drawn, options.plot)
    return Outcome(figures, checks)


def changes(options: Namespace) -> Outcome:
    """Steps of one job from each change until it has measured its arms anew, and what it then takes beside them."""
    figures: dict[str, Any] = {}
    checks = []
    if options.quick:
        return Outcome(figures, checks)
    with training_ranks("tools.bench.programs.cluster", Setting(zipf=options.zipf[-1])) as (cluster, ranks):
        job = Job(Bench(cluster, ranks, 200.0, [AUTO, *FIXED]), cluster)
        for rate, busy in ((200.0, False), (50.0, False), (None, False), (None, True)):
            cluster.limit(rate)
            before = job.tuning()["step"]
            with busy_processor() if busy else nullcontext():
                found = job.train_until(
                    lambda told, before=before: told["step"] > before and not told["measuring"],  # type: ignore[misc]
                    FOLLOWS_STEPS, dense=False,
                )  # fmt: skip
                found |= job.compare(options.rounds, dense=False)
            what = f"{'no limit' if rate is None else f'{rate:g} Mbit/s'}{', a processor taken' * busy}"
            figures[what] = found
            print(what, found["arm"], found["steps"], round(found["over_best"], 3), flush=True)
            checks.append(at_most(f"{what}: steps until it has chosen anew", found["steps"], FOLLOWS_STEPS - 1))
            checks.append(at_most(f"{what}: it / the best fixed arm", found["over_best"], NEAR_BEST))
    return Outcome(figures, checks)


@contextmanager
def busy_processor() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


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
