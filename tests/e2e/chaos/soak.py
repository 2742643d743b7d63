"""Inject faults at random for a given time and report them (``make chaos``, ``make soak``).

``make soak`` (``--all``) adds to the faults of ``make chaos``: poison on the stream, upgrades to
the next version and back, rotated secrets and added tables. Ends with tables of the faults, of the points at which the
daemon was killed and stopped, and of the largest memory, threads, descriptors, disk and queued bytes; with ``--json``,
the last line is one JSON object. Exit code 1 if an invariant was violated or a limit passed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexd.core.supervision import POINTS_OF_A_JOB as POINTS
from tests.e2e.chaos import chaos_operations, chaos_poison, chaos_upgrades
from tests.e2e.chaos.chaos_faults import AT_A_POINT, LONG, Injection, kinds
from tests.e2e.chaos.chaos_processes import ProcessServer
from tests.e2e.chaos.chaos_resources import LIMITS, Maxima, ResourceSampler, is_within_limit, resource_table
from tests.e2e.chaos.chaos_run import ChaosRun, Outcome, figures, table
from tests.e2e.chaos.chaos_world import ChaosWorld
from tests.support.second_tree import write_second_tree
from tools.bench.harness import check, last_line

_FAULTS_A_WORLD = 40
_COUNT_EVERY = 8
_POINTS_A_TURN = 6
"""Faults of each kind of ``AT_A_POINT`` while every other kind strikes once."""
_QUICK_A_TURN = 3
"""The same for poison, which takes a second."""
_LONG_MINUTES = 5.0
"""Runs shorter than this have no time for faults of a minute."""


class Turns:
    """Selects the next fault: every kind once a turn, at the points that were struck least so far.

    Attributes:
        struck: times that the daemon was killed or stopped, by (kind, point).
    """

    def __init__(self, chance: random.Random, only: str, minutes: float, every_kind: bool) -> None:
        self._chance = chance
        self._only = only
        self._every_kind = every_kind
        self._long = dict(LONG) if minutes >= _LONG_MINUTES or only else {}
        self.struck: Counter[tuple[str, str]] = Counter()

    def of_world(self, world: ChaosWorld) -> Iterator[tuple[str, str, Injection]]:
        """(kind, point or nothing, injection) without end; none if no kind is wanted."""
        chance, every = self._chance, self._kinds(world)
        chosen = [kind for kind in every if self._only in kind]
        chosen += [kind for kind in chosen if kind.startswith("poison")] * (_QUICK_A_TURN - 1)
        chosen += [kind for kind in AT_A_POINT if self._only in kind] * _POINTS_A_TURN
        # Once a soak.
        chosen += [kind for kind in self._long if self._only in kind]
        while chosen:
            for kind in chance.sample(chosen, len(chosen)):
                if kind in self._long:
                    chosen.remove(kind)
                    yield kind, "", self._long.pop(kind)
                elif kind in AT_A_POINT:
                    times = {point: sum(self.struck[way, point] for way in AT_A_POINT) for point in POINTS}
                    point = chance.choice([point for point in POINTS if times[point] == min(times.values())])
                    yield kind, point, AT_A_POINT[kind](point, chance.choice((1, 2)))
                else:
                    yield kind, "", chance.choice(every[kind])

    def _kinds(self, world: ChaosWorld) -> dict[str, list[Injection]]:
        """Every kind of fault but those at a point."""
        every = kinds(disk=world.has_disk)
        if self._every_kind:
            every |= chaos_upgrades.KINDS | chaos_poison.kinds() | chaos_operations.KINDS
        return every


class Soak:
    """The results of all worlds of a soak, or of one of the jobs that run worlds beside each other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.struck: Counter[tuple[str, str]] = Counter()
        """Times that the daemon was killed or stopped, by (kind, point)."""
        self.outcomes: list[Outcome] = []
        self.broken: list[str] = []
        self.maxima = Maxima()
        self.worlds = self.steps = 0
        self.largest_loss_difference = 0.0

    def add(self, other: Soak) -> None:
        self.struck += other.struck
        self.outcomes += other.outcomes
        self.broken += other.broken
        self.maxima.merge(other.maxima)
        self.worlds += other.worlds
        self.steps += other.steps
        self.largest_loss_difference = max(self.largest_loss_difference, other.largest_loss_difference)

    def run_world(self, run: ChaosRun, turns: Turns, end: float, *, lose_broker: bool) -> None:
        """Inject faults until ``end``; add the results."""
        self.worlds += 1
        try:
            with run, contextlib.closing(ResourceSampler(run.world)) as sampler:
                self._strike(run, turns, end, lose_broker=lose_broker)
                self.maxima.merge(sampler.maxima)
        except Exception as error:
            # A world that breaks in any way is a violation; the others and the report go on.
            self.broken.append(f"world {self.worlds} (seed {run.world.seed}, {run.world.directory}): {error!r}")
            traceback.print_exc()
        self.broken += run.end_violations
        self.outcomes += run.outcomes
        self.steps += run.steps
        self.largest_loss_difference = max(self.largest_loss_difference, run.largest_loss_difference)

    def _strike(self, run: ChaosRun, turns: Turns, end: float, *, lose_broker: bool) -> None:
        for number, (kind, point, injection) in enumerate(turns.of_world(run.world), 1):
            print(f"{kind} {point}...", file=sys.stderr, flush=True)
            outcome = run.strike(kind, injection)
            if point and "not reached" not in outcome.detail:
                turns.struck[kind, point] += 1
                self.struck[kind, point] += 1
            print(
                f"    {kind} ({outcome.detail}): recovered in {outcome.recovery_seconds:.1f} s, longest added step "
                f"{outcome.added_step_seconds:.2f} s{''.join(f'; {line}' for line in outcome.violations)}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            if time.monotonic() >= end or number >= _FAULTS_A_WORLD:
                break
            if number % _COUNT_EVERY == 0:
                run.count()
        run.finish(lose_broker=lose_broker)

    @property
    def violations(self) -> int:
        return len(self.broken) + sum(len(outcome.violations) for outcome in self.outcomes)

    @property
    def points_struck(self) -> int:
        return len({point for _, point in self.struck})

    def report(self) -> str:
        """Return all tables as Markdown."""
        struck = self.struck
        by_point = [f"| {' | '.join(['point', *AT_A_POINT])} |", "|---" * (1 + len(AT_A_POINT)) + "|"]
        by_point += [f"| {point} | {' | '.join(str(struck[kind, point]) for kind in AT_A_POINT)} |" for point in POINTS]
        line = (
            f"seed {self._seed}: {len(self.outcomes)} faults in {self.worlds} worlds, at {self.points_struck} of "
            f"{len(POINTS)} points; {self.violations} violations; {self.steps} rank steps compared, losses differ by "
            f"at most {self.largest_loss_difference:.2g}"
        )
        return "\n\n".join([line, table(figures(self.outcomes)), "\n".join(by_point), resource_table(self.maxima)])

    def checks(self) -> list[dict[str, Any]]:
        found = [check("invariant violations", self.violations, "0", self.violations == 0)]
        for name, seen in asdict(self.maxima).items():
            limit = getattr(LIMITS, name)
            found.append(check(f"largest {name}", seen, f"0 to {limit}", is_within_limit(self.maxima, name)))
        return found

    def figures(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "faults": len(self.outcomes),
            "points_struck": self.points_struck,
            "worlds": self.worlds,
            "steps_checked": self.steps,
            "largest_loss_difference": self.largest_loss_difference,
            "maxima": asdict(self.maxima),
            "kinds": {row["kind"]: row for row in figures(self.outcomes)},
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--hours", type=float, help="instead of --minutes")
    parser.add_argument("--jobs", type=int, default=1, help="worlds beside each other, each with faults of its own")
    parser.add_argument("--all", action="store_true", help="add poison, upgrades and operations")
    parser.add_argument("--only", default="", help="only kinds of fault whose name has this text in it")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    arguments = parser.parse_args()
    minutes = arguments.minutes if arguments.hours is None else 60 * arguments.hours
    soak = Soak(arguments.seed)
    with contextlib.ExitStack() as servers:
        this = servers.enter_context(contextlib.closing(ProcessServer()))
        following = None
        if arguments.all:
            tree = write_second_tree(Path(tempfile.mkdtemp(prefix="flexd-next-")))
            following = servers.enter_context(contextlib.closing(ProcessServer(tree)))
        chance = random.Random(arguments.seed)
        seeds = [arguments.seed if at == 0 else chance.randrange(2**31) for at in range(arguments.jobs)]
        end = time.monotonic() + 60 * minutes
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for done in pool.map(lambda seed: _job(seed, arguments, end, (this, following)), seeds):
                soak.add(done)
    print(soak.report())
    for line in soak.broken:
        print(line, file=sys.stderr)
    checks = soak.checks()
    if arguments.json:
        print(last_line(soak.figures(), checks))
    return 0 if all(entry["ok"] for entry in checks) else 1


def _job(
    seed: int, arguments: argparse.Namespace, end: float,
    versions: tuple[ProcessServer, ProcessServer | None],
) -> Soak:  # fmt: skip
    """Run one world after the other; the seed selects the faults."""
    soak, chance = Soak(seed), random.Random(seed)
    turns = Turns(chance, arguments.only, (end - time.monotonic()) / 60, arguments.all)
    while time.monotonic() < end:
        directory = Path(tempfile.mkdtemp(prefix="flexd-chaos-"))
        run = ChaosRun(directory, chance.randrange(2**31), versions[0], next_server=versions[1])
        soak.run_world(run, turns, end, lose_broker=arguments.only in "broker killed")
    return soak


if __name__ == "__main__":
    sys.exit(main())
