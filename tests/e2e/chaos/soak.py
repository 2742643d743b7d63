"""Inject faults at random for a given time and report them (``make chaos``, ``make soak``).

``make soak`` (``--all``) adds to the faults of ``make chaos``: poison on the stream, upgrades to
the next version and back, rotated secrets and added tables. In three of ten steps the trainer of each is careless
(``chaos_misuse``). Ends with tables of the faults, of the misuses, of the points at which the
daemon was killed and stopped, and of the largest memory, threads, descriptors, disk and queued bytes; with ``--json``,
the last line is one JSON object. Exit code 1 if an invariant was violated or a limit passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from flexd.control.daemon.channel_events import ChannelOptions
from flexd.core.supervision import POINTS_OF_A_JOB as POINTS
from tests.e2e.chaos.chaos_faults import AT_A_POINT, LONG, Injection, kinds
from tests.e2e.chaos.chaos_kinds import OPERATIONS, POISON, UPGRADES
from tests.e2e.chaos.chaos_misuse import MISUSES
from tests.e2e.chaos.chaos_processes import ProcessServer
from tests.e2e.chaos.chaos_run import ChaosRun, Outcome, figures, table
from tests.e2e.chaos.chaos_training import RANK_SECONDS
from tests.e2e.chaos.chaos_world import BALLAST, ChaosWorld
from tests.support.second_tree import write_second_tree
from tools.bench.harness import check, flat

_FAULTS_A_WORLD = 40
_COUNT_EVERY = 8
_POINTS_A_TURN = 6
"""Faults of each kind of ``AT_A_POINT`` while every other kind strikes once."""
_QUICK_A_TURN = 3
"""The same for poison, which takes a second."""
_LONG_MINUTES = 5.0
"""Runs shorter than this have no time for faults of a minute."""


_SECONDS = 0.5
_EVERY = 4
"""Samples between two looks at disk and metrics."""
_QUEUED = ("flexd_control_queued_bytes", "flexd_control_unread_bytes")
MIB = 2**20


LIMITS = {
    "daemon_bytes": 1024 * MIB, "daemon_threads": 64, "daemon_descriptors": ChannelOptions().max_unproven + 256,
    "rank_bytes": 768 * MIB, "rank_threads": 48, "rank_descriptors": 256, "disk_bytes": 8 * MIB,
    "queued_bytes": 320 * MIB,
}  # fmt: skip
"""Of the largest values seen. Memory is resident, of one process, with the pages that all of them share: most of it is
libraries, some 300 MiB; floods may add what docs/security.md states. Disk: of the state directory. Queued: in the
daemon's memory, to be sent to ranks or received from them."""


def raise_to(maxima: dict[str, int], values: dict[str, int]) -> None:
    """Raise maxima to what was seen; they begin at -1, which is not measured."""
    for name, value in values.items():
        maxima[name] = max(maxima.get(name, -1), value)


class ResourceSampler:
    """Looks at the processes of a world until it is closed, in a thread of its own."""

    def __init__(self, world: ChaosWorld) -> None:
        self.maxima = dict.fromkeys(LIMITS, -1)
        self._world = world
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        turn = 0
        while not self._done.wait(_SECONDS):
            turn += 1
            self._processes()
            if turn % _EVERY == 0:
                sizes = {"disk_bytes": _disk_bytes(self._world.state), "queued_bytes": self._queued_bytes()}
                raise_to(self.maxima, sizes)

    def _processes(self) -> None:
        world = self._world
        found = [] if world.daemon is None else [("daemon", world.daemon)]
        found += [("rank", child) for child in (world.job.children if world.attempts else ())]
        for kind, child in found:
            raise_to(self.maxima, {f"{kind}_{what}": value for what, value in _used(child.pid).items()})

    def _queued_bytes(self) -> int:
        try:
            page = httpx.get(f"{self._world.url}/metrics", timeout=1.0, verify=False).text
        except httpx.HTTPError:
            return -1
        found = {line.split()[0]: float(line.split()[1]) for line in page.splitlines() if line.startswith(_QUEUED)}
        return int(sum(found.values())) if len(found) == len(_QUEUED) else -1


def _used(pid: int) -> dict[str, int]:
    """Return resident bytes, threads and descriptors; nothing of a process that has ended."""
    process = Path("/proc") / str(pid)
    try:
        facts = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        memory = int(facts["VmRSS"].split()[0]) * 1024
        return {"bytes": memory, "threads": int(facts["Threads"]), "descriptors": len(os.listdir(process / "fd"))}
    except (OSError, KeyError):
        return {}


def _disk_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() and path.name != BALLAST else 0
        except OSError:
            continue
    return total


def resource_table(maxima: dict[str, int]) -> str:
    """As Markdown."""
    rows = ["| largest | seen | limit of the run |", "|---|---|---|"]
    for item, limit in LIMITS.items():
        unit = MIB if item.endswith("_bytes") else 1
        seen = "not measured" if maxima[item] < 0 else f"{maxima[item] / unit:.{int(unit > 1)}f}"
        rows.append(f"| {item.replace('_bytes', ', MiB').replace('_', ' ')} | {seen} | {limit / unit:.0f} |")
    return "\n".join(rows)


class Turns:
    """Selects the next fault: every kind once a turn, at the points that were struck least so far.

    Args:
        struck: times that the daemon was killed or stopped so far, by (kind, point).
    """

    def __init__(
        self, chance: random.Random, only: str, minutes: float, every_kind: bool, struck: Counter[tuple[str, str]]
    ) -> None:
        self._chance = chance
        self._only = only
        self._every_kind = every_kind
        self._long = dict(LONG) if minutes >= _LONG_MINUTES or only else {}
        self._struck = struck

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
                    times = {point: sum(self._struck[way, point] for way in AT_A_POINT) for point in POINTS}
                    point = chance.choice([point for point in POINTS if times[point] == min(times.values())])
                    yield kind, point, AT_A_POINT[kind](point, chance.choice((1, 2)))
                else:
                    yield kind, "", chance.choice(every[kind])

    def _kinds(self, world: ChaosWorld) -> dict[str, list[Injection]]:
        """Every kind of fault but those at a point."""
        every = kinds(disk=world.has_disk)
        if self._every_kind:
            every |= UPGRADES | POISON | OPERATIONS
        return every


class Soak:
    """The runs of all worlds of a soak, or of one of the jobs that run worlds beside each other.

    Attributes:
        struck: times that the daemon was killed or stopped, by (kind, point).
        broken: violations at the end of worlds, one line each.
        maxima: the largest values of ``LIMITS`` that were seen.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.struck: Counter[tuple[str, str]] = Counter()
        self.runs: list[ChaosRun] = []
        self.broken: list[str] = []
        self.maxima = dict.fromkeys(LIMITS, -1)

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for run in self.runs for outcome in run.outcomes]

    def add(self, other: Soak) -> None:
        self.struck += other.struck
        self.runs += other.runs
        self.broken += other.broken
        raise_to(self.maxima, other.maxima)

    def run_world(self, run: ChaosRun, turns: Turns, end: float, *, lose_broker: bool) -> None:
        """Inject faults until ``end``; add the results."""
        self.runs.append(run)
        try:
            with run, contextlib.closing(ResourceSampler(run.world)) as sampler:
                self._strike(run, turns, end, lose_broker=lose_broker)
                raise_to(self.maxima, sampler.maxima)
        except Exception as error:
            # A world that breaks in any way is a violation; the others and the report go on.
            self.broken.append(f"world {len(self.runs)} (seed {run.world.seed}, {run.world.directory}): {error!r}")
            traceback.print_exc()
        self.broken += run.end_violations

    def _strike(self, run: ChaosRun, turns: Turns, end: float, *, lose_broker: bool) -> None:
        for number, (kind, point, injection) in enumerate(turns.of_world(run.world), 1):
            print(f"{kind} {point}...", file=sys.stderr, flush=True)
            outcome = run.strike(kind, injection)
            if point and "not reached" not in outcome.detail:
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

    def figures(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "faults": len(self.outcomes),
            "points_struck": len({point for _, point in self.struck}),
            "worlds": len(self.runs),
            "steps_checked": sum(run.steps for run in self.runs),
            "largest_loss_difference": max((run.largest_loss_difference for run in self.runs), default=0.0),
            "longest_step_seconds": max((run.longest_step_seconds for run in self.runs), default=0.0),
            "misuses": dict(sum((run.misuses for run in self.runs), Counter[str]())),
            "maxima": self.maxima,
            "violations": len(self.broken) + sum(len(outcome.violations) for outcome in self.outcomes),
            "kinds": {row["kind"]: row for row in figures(self.outcomes)},
        }

    def report(self) -> str:
        """Return all tables as Markdown."""
        struck = self.struck
        by_point = [f"| {' | '.join(['point', *AT_A_POINT])} |", "|---" * (1 + len(AT_A_POINT)) + "|"]
        by_point += [f"| {point} | {' | '.join(str(struck[kind, point]) for kind in AT_A_POINT)} |" for point in POINTS]
        found = self.figures()
        line = (
            f"seed {self._seed}: {found['faults']} faults in {found['worlds']} worlds, at {found['points_struck']} of "
            f"{len(POINTS)} points; {found['violations']} violations; {found['steps_checked']} rank steps compared, "
            f"losses differ by at most {found['largest_loss_difference']:.2g}; the longest step took "
            f"{found['longest_step_seconds']:.1f} s"
        )
        misuses = [
            "| misuse | steps |",
            "|---|---|",
            *(f"| {kind} | {found['misuses'].get(kind, 0)} |" for kind in MISUSES),
        ]
        return "\n\n".join(
            [line, table(figures(self.outcomes)), "\n".join(misuses), "\n".join(by_point), resource_table(self.maxima)]
        )

    def checks(self) -> list[dict[str, Any]]:
        of_run = self.figures()
        violations, longest = of_run["violations"], of_run["longest_step_seconds"]
        found = [
            check("invariant violations", violations, "0", violations == 0),
            check("longest step, s", longest, f"0 to {RANK_SECONDS:.0f}", longest <= RANK_SECONDS),
        ]
        for name, limit in LIMITS.items():
            seen = self.maxima[name]
            found.append(check(f"largest {name}", seen, f"0 to {limit}", 0 <= seen <= limit))
        return found


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
        print(json.dumps({"figures": flat(soak.figures()), "checks": checks}))
    return 0 if all(entry["ok"] for entry in checks) else 1


def _job(
    seed: int, arguments: argparse.Namespace, end: float,
    versions: tuple[ProcessServer, ProcessServer | None],
) -> Soak:  # fmt: skip
    """Run one world after the other; the seed selects the faults."""
    soak, chance = Soak(seed), random.Random(seed)
    turns = Turns(chance, arguments.only, (end - time.monotonic()) / 60, arguments.all, soak.struck)
    while time.monotonic() < end:
        directory = Path(tempfile.mkdtemp(prefix="flexd-chaos-"))
        run = ChaosRun(directory, chance.randrange(2**31), versions[0], next_server=versions[1])
        soak.run_world(run, turns, end, lose_broker=arguments.only in "broker killed")
    return soak


if __name__ == "__main__":
    sys.exit(main())
