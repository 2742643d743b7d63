"""Faults at random for as long as asked, and the report (``make chaos SEED=... MINUTES=...``).

Ends with a table of the faults and, last, one JSON object. Exit code 1 if an invariant was violated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "support"), str(ROOT), str(ROOT / "tools")]

from bench_report import check, last_line  # noqa: E402
from chaos_faults import kinds  # noqa: E402
from chaos_processes import ProcessServer  # noqa: E402
from chaos_run import ChaosRun, Outcome, as_json, figures, table  # noqa: E402

_FAULTS_A_WORLD = 30
_COUNT_EVERY = 8


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
    server = ProcessServer()
    try:
        while time.monotonic() < end:
            seed = chance.randrange(2**31)
            directory = Path(tempfile.mkdtemp(prefix="flexd-chaos-"))
            run = ChaosRun(directory, seed, server, scale_out=worlds % 2 == 1)
            worlds += 1
            try:
                with run:
                    _soak(run, chance, end, arguments.only)
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
    violations = len(broken) + sum(len(outcome.violations) for outcome in outcomes)
    summary = {"faults": len(outcomes), "worlds": worlds, "steps_checked": steps, "largest_loss_difference": largest}
    checks = [check("invariant violations", violations, "0", violations == 0)]
    print(last_line({**summary, "kinds": {row["kind"]: row for row in rows}}, checks))
    return 1 if violations else 0


def _soak(run: ChaosRun, chance: random.Random, end: float, only: str) -> None:
    world = run.world
    every = kinds(scale_out=world.scale_out, disk=world.has_disk)
    chosen = [kind for kind in every if only in kind]
    turn: list[str] = []
    for number in range(_FAULTS_A_WORLD):
        if time.monotonic() >= end or not chosen:
            break
        if not turn:
            turn = chance.sample(chosen, len(chosen))
        kind = turn.pop()
        print(f"{kind} ...", file=sys.stderr, flush=True)
        outcome = run.strike(kind, chance.choice(every[kind]))
        print(
            f"    ({outcome.detail}): recovered in {outcome.recovery_seconds:.1f} s, longest added step "
            f"{outcome.added_step_seconds:.2f} s{''.join(f'; {line}' for line in outcome.violations)}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        if (number + 1) % _COUNT_EVERY == 0:
            run.count()
    run.finish(lose_broker=only in "broker killed")


if __name__ == "__main__":
    sys.exit(main())
