"""A job whose plans a daemon makes and verifies, beside the same job without a daemon.

Two nodes of two ranks, joined by a limited link; the daemon runs in the first node, counts by the
tap, and prices plans by a probe of these links. After the daemon has come to a decision (nothing to move, or a verdict
on its plan), it is paused, and steps with it and without it (chain, no tap, no connection) are trained in turns on the
same batches. The ratio of the two is the median over the turns, with its 95 % interval by order statistics.

Jobs:
  ordinary   prices as probed, Zipf 1.05 and 1.2, with and without a dense part, three seeds: at most 1.02
  winning    4 micro-batches per step, rows of 256 numbers, 50 Mbit/s: copies win, at most 0.90
  default    both of these once more (Zipf 1.2), by default settings of both trainers, which choose their exchange

Needs root, ip, tc and setpriv; says so and ends well without. ``--quick``: one small job, of which only is checked that
it trains.

"""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from scipy.stats import binom

from tools.bench.cluster import Cluster, ClusterError
from tools.bench.harness import Outcome, at_least, at_most, check
from tools.bench.ranks import Ranks, training_ranks
from tools.bench.workloads import Setting

CONTROL_PORT, API = 29_400, "http://127.0.0.1:8080"
START_SECONDS, STEP_SECONDS = 120.0, 20.0
TURN_STEPS, MOST_ROUNDS, ARMS_BEGIN_STEPS = 10, 41, 150
NEVER_SLOWER, WINS = 1.02, 0.90
IN_FLIGHT = ("pending", "pushing", "applying", "aborting")


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        rate_mbit: of a node's link; None: no limit.
        most: the largest allowed ratio of the steps.
        default: the trainers choose their exchange; otherwise it is the chain.
        prefetch: with ``default``: their loops go over ``flexd.prefetch``, which chooses too.
    """

    name: str
    setting: Setting
    rate_mbit: float | None = 200.0
    dense: bool = False
    micro_batches: int = 1
    most: float = NEVER_SLOWER
    default: bool = False
    prefetch: bool = True


@dataclass(frozen=True)
class Effort:
    """Times and counts of the parts of a job.

    Attributes:
        decide_seconds: the longest time until the daemon decides.
        rounds: turns of each of those compared, at least.
        turn_seconds: turns of each take about so long, at most ``MOST_ROUNDS``.
        budget_steps: of a verification.
        choosing_steps: within these a trainer with default settings has chosen.
        probe_seconds, probe_bytes: time and largest message of the probe of a link.
    """

    decide_seconds: float = 600.0
    rounds: int = 9
    turn_seconds: float = 12.0
    budget_steps: int = 480
    choosing_steps: int = 500
    probe_seconds: float = 30.0
    probe_bytes: int = 4 * 2**20


def jobs() -> list[Job]:
    winning = Job(
        "winning", Setting(rows=20_000, dim=256, samples=64, zipf=1.5, batches=48), rate_mbit=50, micro_batches=4,
        most=WINS,
    )  # fmt: skip
    ordinary = [
        Job(f"ordinary, Zipf {zipf}{', dense' * dense}, seed {seed}", Setting(zipf=zipf, seed=seed), dense=dense)
        for zipf in (1.05, 1.2)
        for dense in (False, True)
        for seed in (1, 2, 3)
    ]
    default = [
        Job("default settings, Zipf 1.2", Setting(zipf=1.2, seed=1), default=True),
        replace(winning, name="default settings, winning", default=True),
    ]
    return [*ordinary, winning, *default]


class Bench:
    """The jobs of one cluster."""

    def __init__(self, cluster: Cluster, ranks: Ranks, directory: Path) -> None:
        self._cluster, self.ask, self._directory = cluster, ranks.ask, directory
        self._secret = directory / "secret"
        self._secret.write_text(secrets.token_hex(32))
        self._secret.chmod(0o600)
        self._probed: dict[float | None, Path] = {}
        self._config = directory / "flexd.yaml"

    def train(self, which: str, job: Job, steps: int) -> list[float]:
        """Seconds of each step, the mean over the ranks."""
        answers = self.ask(60 + STEP_SECONDS * steps, "train", strategy=which, dense=job.dense, steps=steps)
        return list(np.mean([answer["seconds"] for answer in answers], axis=0))

    def run(self, job: Job, effort: Effort, beside: Sequence[str] = ()) -> dict[str, Any]:
        """Return the figures of one job.

        Args:
            beside: strategies that the ranks have prepared, which take turns with the two.
        """
        self._cluster.limit(job.rate_mbit)
        self.ask(START_SECONDS, "begin", setting=asdict(job.setting))
        for name in beside:
            self.ask(START_SECONDS, "make", strategy=name)
        with self._daemon(job, effort):
            address = f"{self._cluster.address(0)}:{CONTROL_PORT}"
            self.ask(
                START_SECONDS, "join", address=address, api=API, secret_file=str(self._secret),
                micro_batches=job.micro_batches, default=job.default, prefetch=job.prefetch,
            )  # fmt: skip
            try:
                decided = self._decide(job, effort)
                self._work_as_rarely_as_by_default()
                compared = self._compare(job, effort, beside)
                rows = self.ask(STEP_SECONDS, "replicated")[0]
            finally:
                self.ask(60, "leave")
        return {"name": job.name, "rows_with_copies": rows, **decided, **compared}

    def _topology(self, job: Job, effort: Effort) -> Path:
        if job.rate_mbit not in self._probed:
            file = self._directory / f"probed-{job.rate_mbit}.yaml"
            self.ask(150, "probe", file=str(file), max_bytes=effort.probe_bytes, budget_seconds=effort.probe_seconds)
            self._probed[job.rate_mbit] = file
        return self._probed[job.rate_mbit]

    @contextmanager
    def _daemon(self, job: Job, effort: Effort) -> Iterator[None]:
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        setting = job.setting
        settings = {
            "job": "verify",
            "tables": [
                {"name": table.name, "rows": table.rows, "dim": table.dim, "optimizer": "rowwise_adagrad"}
                for table in setting.embedding_tables()
            ],
            "state": {"dir": str(directory / "state"), "snapshot_interval_seconds": 2.0},
            "stream": {"source": {"kind": "tap"}},
            "topology": {"file": str(self._topology(job, effort))},
            "planner": {
                "interval_seconds": 5.0, "drift_threshold": None,
                "verify_budget_steps": effort.budget_steps,
            },
            "control": {
                "listen_host": self._cluster.address(0), "listen_port": CONTROL_PORT,
                "secret_file": str(self._secret),
            },
            "server": {"port": int(API.rpartition(":")[2])},
        }  # fmt: skip
        self._config.write_text(yaml.safe_dump(settings))
        with (directory / "daemon.log").open("wb") as log:
            daemon = self._cluster.start_in(
                0, [sys.executable, "-m", "flexd", "run", "-c", str(self._config)], {"OMP_NUM_THREADS": "1"},
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            if not all(self.ask(START_SECONDS + 10, "wait_until_healthy", api=API, within=START_SECONDS)):
                raise ClusterError(f"the daemon did not start:\n{(directory / 'daemon.log').read_text()[-2000:]}")
            yield
        finally:
            daemon.kill()
            daemon.wait(10)

    def _work_as_rarely_as_by_default(self) -> None:
        """Pause the daemon, so that what is compared stays, and end the haste in which it had to decide: it makes plans
        while it is paused, too, and ranks send it what they count after each snapshot."""
        settings = yaml.safe_load(self._config.read_text())
        del settings["planner"]["interval_seconds"], settings["state"]["snapshot_interval_seconds"]
        self._config.write_text(yaml.safe_dump(settings))
        for path in ("/v1/pause", "/v1/config/reload"):
            self.ask(STEP_SECONDS, "command", path=path)

    def _decide(self, job: Job, effort: Effort) -> dict[str, Any]:
        """Train until the daemon has decided what to do with its plans."""
        deadline = time.monotonic() + effort.decide_seconds
        before = self.train("daemon", job, TURN_STEPS)
        seconds: list[float] = []
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            seconds += self.train("daemon", job, TURN_STEPS)
            status = self.ask(STEP_SECONDS, "status")[0] or status
            if has_settled(status) and len(seconds) >= job.default * effort.choosing_steps:
                break
        verification = status["planning"]["verification"]["newest"]
        return {
            "decided": has_settled(status),
            "verdict": "nothing to move" if verification is None else verification["state"],
            "rolled_back": verification is not None and verification["rolled_back"],
            "steps_until_decided": len(seconds),
            "plans": dict(status["planning"]["plans"]),
            # Of the steps until the decision, moves of rows and blocks without copies included.
            "deciding_over_before": float(np.mean(seconds) / np.mean(before[1:])),
        }

    def _until_chosen(self, name: str, job: Job, effort: Effort) -> None:
        """Train until the job has chosen its arm: what measuring arms costs, again after each new placement, is bounded
        by ``flexd.embedding.tuner`` and measured by ``cases.auto``."""
        deadline = time.monotonic() + effort.decide_seconds
        while effort.rounds > 1 and time.monotonic() < deadline:
            if not any(answer["measuring"] for answer in self.ask(STEP_SECONDS, "tuning", strategy=name)):
                break
            self.train(name, job, TURN_STEPS)

    def _compare(self, job: Job, effort: Effort, beside: Sequence[str]) -> dict[str, Any]:
        """In turns, so that what else the machine does falls on both alike; the first step of a turn is left out."""
        self._cluster.limit(job.rate_mbit)
        choosing = ("chain", "daemon") if job.default else ()
        names = ["chain", "daemon", *beside]
        for name in names:
            # The daemon's job begins to measure arms some time after its last rows were moved.
            steps = {"chain": effort.choosing_steps, "daemon": min(effort.choosing_steps, ARMS_BEGIN_STEPS)}
            self.train(name, job, steps[name] if name in choosing else 3)
        taken: dict[str, list[float]] = {name: [] for name in names}
        began, turns = time.monotonic(), 0
        while turns < effort.rounds or (
            turns < MOST_ROUNDS and time.monotonic() - began < effort.turn_seconds * len(names)
        ):
            for name in names:
                if name in choosing:
                    self._until_chosen(name, job, effort)
                taken[name].append(median(self.train(name, job, TURN_STEPS + 1)[1:]))
            names.reverse()
            turns += 1
        ratios = [with_it / without for with_it, without in zip(taken["daemon"], taken["chain"], strict=True)]
        low, high = interval(ratios)
        seconds = {f"{name}_seconds": median(of_turns) for name, of_turns in taken.items()}
        return {"ratio": median(ratios), "ratio_low": low, "ratio_high": high, **seconds}


def has_settled(status: dict[str, Any]) -> bool:
    """Return True after a decision, when neither a migration nor a verification is running or due."""
    if not status:
        return False
    planning = status["planning"]
    newest, migration = planning["verification"]["newest"], status["migration"]
    if migration is not None and migration["state"] in IN_FLIGHT:
        return False
    if newest is not None:
        # The verification of another plan begins when the ranks have measured their arms, a rollback when they train.
        plan, _, what = ("", "", "") if migration is None else migration["migration_id"].partition(".")
        done = plan == newest["migration_id"] and what.startswith("rollback" if newest["rolled_back"] else "")
        return bool(newest["state"] != "running" and done)
    outcomes = planning["plans"]
    return bool(outcomes.get("unchanged", 0) + outcomes.get("withheld", 0) >= 2 and not outcomes.get("changed", 0))


def interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of the median by order statistics; the whole range where there are too few samples."""
    ordered = sorted(samples)
    outside = int(binom.ppf((1 - confidence) / 2, len(ordered), 0.5)) - 1
    outside = max(0, min(outside, (len(ordered) - 1) // 2))
    return ordered[outside], ordered[-1 - outside]


def checks_of(job: Job, found: dict[str, Any]) -> list[dict[str, Any]]:
    """A decision, the bound on the step time, and a verdict that agrees with the comparison."""
    checks = [check(f"{job.name}: the daemon decided", found["decided"], "1", found["decided"])]
    ratio = found["ratio"]
    checks.append(at_most(f"{job.name}: step with the daemon / without", ratio, job.most))
    if job.most < 1:
        # What took copies back may have been measured last.
        right = bool(found["rows_with_copies"])
        checks.append(check(f"{job.name}: copies stay where they win", right, "1", right))
    return checks


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--named", default="", help="run the jobs whose names contain this")


def section(options: Namespace) -> Outcome:
    effort, chosen = Effort(), [job for job in jobs() if options.named in job.name]
    if options.quick:
        effort = Effort(20.0, 2, 0.0, 256)
        chosen = [Job("quick", Setting(samples=64, batches=4, zipf=1.2))]
    figures, checks = {}, []
    for job, found in run(chosen, effort):
        figures[job.name] = found
        if options.quick:
            steps = found["steps_until_decided"]
            checks.append(at_least("quick: steps trained with the daemon", steps, TURN_STEPS))
        else:
            checks += checks_of(job, found)
    return Outcome(figures, checks)


def run(chosen: Sequence[Job], effort: Effort) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield each job with its figures. Jobs of one link share their probe."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-verify-") as directory,
        training_ranks("tools.bench.programs.verify", chosen[0].setting) as (cluster, ranks),
    ):
        bench = Bench(cluster, ranks, Path(directory))
        for job in chosen:
            yield job, bench.run(job, effort)


SECTIONS = {"jobs": section}
