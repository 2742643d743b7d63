"""Inject faults at random for a given time and report them (``make chaos SEED=... MINUTES=...``).

Ends with a table of the faults and, last, one JSON object. Exit code 1 if an invariant was violated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench_report import check, last_line

from flexd.core.fault_points import POINTS
from tests.e2e.chaos.chaos_faults import AT_A_POINT, LONG, Injection, kinds, points
from tests.e2e.chaos.chaos_processes import ProcessServer
from tests.e2e.chaos.chaos_run import ChaosRun, Outcome, as_json, figures, table
from tests.e2e.chaos.chaos_standby import KINDS as STANDBY_KINDS

_FAULTS_A_WORLD = 24
_COUNT_EVERY = 8
_POINTS_A_TURN = 6
"""Faults of each kind of ``AT_A_POINT`` while every other kind strikes once."""
_WORLDS: tuple[dict[str, bool], ...] = ({}, {"scale_out": True}, {"standby": True})
_LONG_MINUTES = 5.0
"""Runs shorter than this have no time for faults of a minute."""


class Turns:
    """Which fault is next: every kind once a turn, at the points that were struck least so far."""

    def __init__(self, chance: random.Random, only: str, minutes: float) -> None:
        self._chance = chance
        self._only = only
        self._long = dict(LONG) if minutes >= _LONG_MINUTES or only else {}
        self.struck = dict.fromkeys(POINTS, 0)

    def of_world(self, run: ChaosRun) -> Iterator[tuple[str, str, Injection]]:
        """(kind, point or nothing, injection) without end; none if no kind is wanted."""
        world, chance = run.world, self._chance
        every = STANDBY_KINDS if world.has_standby else kinds(scale_out=world.scale_out, disk=world.has_disk)
        passed = points(scale_out=world.scale_out)
        chosen = [kind for kind in every if self._only in kind]
        if not world.has_standby:
            chosen += [kind for kind in AT_A_POINT if self._only in kind] * _POINTS_A_TURN
            # Once a soak, in a world where they can be.
            chosen += [kind for kind in self._long if self._only in kind]
        while chosen:
            for kind in chance.sample(chosen, len(chosen)):
                if kind in self._long:
                    chosen.remove(kind)
                    yield kind, "", self._long.pop(kind)
                elif kind in AT_A_POINT:
                    fewest = min(self.struck[point] for point in passed)
                    point = chance.choice([point for point in passed if self.struck[point] == fewest])
                    yield kind, point, AT_A_POINT[kind](point, chance.choice((1, 2)))
                else:
                    yield kind, "", chance.choice(every[kind])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--only", default="", help="only kinds of fault whose name has this text in it")
    parser.add_argument("--outcomes", type=Path, help="write every single fault as JSON here")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    chance = random.Random(arguments.seed)
    outcomes: list[Outcome] = []
    broken: list[str] = []
    steps, largest, worlds = 0, 0.0, 0
    turns = Turns(chance, arguments.only, arguments.minutes)
    server = ProcessServer()
    try:
        while time.monotonic() < end:
            seed = chance.randrange(2**31)
            directory = Path(tempfile.mkdtemp(prefix="flexd-chaos-"))
            run = ChaosRun(directory, seed, server, **_WORLDS[worlds % len(_WORLDS)])
            worlds += 1
            try:
                with run:
                    _soak(run, turns, end, lose_broker=arguments.only in "broker killed")
            except (AssertionError, TimeoutError) as error:
                broken.append(f"world {worlds} (seed {seed}, {directory}): {error}")
                print(broken[-1], file=sys.stderr)
            broken += run.end_violations
            outcomes += run.outcomes
            steps, largest = steps + run.steps, max(largest, run.largest_loss_difference)
    finally:
        server.close()
    rows = figures(outcomes)
    print(table(rows))
    for line in broken:
        print(line, file=sys.stderr)
    if arguments.outcomes is not None:
        arguments.outcomes.write_text(json.dumps(as_json(outcomes), indent=1))
    struck = [point for point, times in turns.struck.items() if times]
    missed = [point for point in POINTS if point not in struck]
    print(f"\nfault points struck: {len(struck)} of {len(POINTS)}{'; not: ' if missed else ''}{', '.join(missed)}")
    violations = len(broken) + sum(len(outcome.violations) for outcome in outcomes)
    summary = {
        "faults": len(outcomes),
        "points_struck": len(struck),
        "worlds": worlds,
        "steps_checked": steps,
        "largest_loss_difference": largest,
    }
    checks = [check("invariant violations", violations, "0", violations == 0)]
    print(last_line({**summary, "kinds": {row["kind"]: row for row in rows}}, checks))
    return 1 if violations else 0


def _soak(run: ChaosRun, turns: Turns, end: float, *, lose_broker: bool) -> None:
    most = 2 * len(STANDBY_KINDS) if run.world.has_standby else _FAULTS_A_WORLD
    for number, (kind, point, injection) in enumerate(turns.of_world(run), 1):
        print(f"{kind} {point}...", file=sys.stderr, flush=True)
        outcome = run.strike(kind, injection)
        if point and "not reached" not in outcome.detail:
            turns.struck[point] += 1
        print(
            f"    ({outcome.detail}): recovered in {outcome.recovery_seconds:.1f} s, longest added step "
            f"{outcome.added_step_seconds:.2f} s{''.join(f'; {line}' for line in outcome.violations)}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        if time.monotonic() >= end or number >= most:
            break
        if number % _COUNT_EVERY == 0:
            run.count()
    run.finish(lose_broker=lose_broker)


if __name__ == "__main__":
    sys.exit(main())
