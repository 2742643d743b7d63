"""One fault after another in one world, checked after each; the report of what they did."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from tests.e2e.chaos.chaos_faults import RANKS_STRUCK, Injection, kill_broker
from tests.e2e.chaos.chaos_invariants import Checker, longest_step
from tests.e2e.chaos.chaos_processes import ProcessServer
from tests.e2e.chaos.chaos_world import ChaosWorld
from tests.support.until import until

RECOVERY_SECONDS = 90.0


@dataclass(frozen=True)
class Outcome:
    """One fault and what it cost.

    Attributes:
        recovery_seconds: from the end of the fault until every rank had applied a chunk that it had not before.
        added_step_seconds: longest step during fault and recovery over the median step before, of any rank; 0 if the
            fault held up the ranks themselves.
        steps: of every rank, during fault and recovery.
        violations: one line each; empty is well.
    """

    kind: str
    detail: str
    recovery_seconds: float
    added_step_seconds: float
    steps: int
    violations: tuple[str, ...]


class ChaosRun:
    """A context manager: a world in which faults strike until its end.

    ``finish`` checks what can be checked at the end only.
    """

    def __init__(self, directory: Path, seed: int, server: ProcessServer, **options: Any) -> None:
        self._chance = random.Random(seed)
        self.world = ChaosWorld(directory, seed, server, **options)
        self.outcomes: list[Outcome] = []
        self.end_violations: list[str] = []
        self.steps = 0
        self.largest_loss_difference = 0.0

    def __enter__(self) -> ChaosRun:
        self.world.__enter__()
        try:
            self.checker = Checker(self.world)
            until(lambda: self.world.job.version > 0, 90.0, self.world.where)
        except BaseException:
            self.world.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.world.__exit__(kind, error, trace)

    def strike(self, kind: str, injection: Injection) -> Outcome:
        """Inject a fault, heal it, wait for recovery and check. Raises AssertionError if a process does not recover."""
        world = self.world
        job, began, steps = world.job, time.monotonic(), world.job.done
        detail = injection(world, self._chance)
        healed = time.monotonic()
        version = world.job.version
        world.moved_on(RECOVERY_SECONDS)
        recovered = max(next(step.at for step in rank if step.version > version) for rank in world.job.steps)
        longest, usual = longest_step(job, began, time.monotonic())
        same = world.job is job
        outcome = Outcome(
            kind=kind,
            detail=detail,
            recovery_seconds=max(0.0, recovered - healed),
            added_step_seconds=0.0 if kind in RANKS_STRUCK else max(0.0, longest - usual),
            steps=world.job.done - (steps if same else 0),
            violations=(*self.checker.training(), *self.checker.placement()),
        )
        self.outcomes.append(outcome)
        return outcome

    def count(self) -> list[str]:
        """Check that all accesses so far are counted once."""
        with self.world.publishing_held():
            wrong = self.checker.counted()
        self.end_violations += wrong
        return wrong

    def finish(self, *, lose_broker: bool = False) -> list[str]:
        """Counts, ends training and daemon, and compares tables. The violations that this has found."""
        wrong = self.count()
        if lose_broker:
            self.strike("broker killed", kill_broker)
        self.world.stop_training()
        self.world.stop_daemon()
        wrong += [*self.checker.training(), *self.checker.tables()]
        self.end_violations += wrong
        self.steps, self.largest_loss_difference = self.checker.steps_checked, self.checker.largest_loss_difference
        return wrong


def figures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """By kind of fault: how many, violations, recovery and added step time in seconds."""
    rows = []
    for kind in sorted({outcome.kind for outcome in outcomes}):
        mine = [outcome for outcome in outcomes if outcome.kind == kind]
        recovery = [outcome.recovery_seconds for outcome in mine]
        rows.append(
            {
                "kind": kind,
                "injected": len(mine),
                "violations": sum(len(outcome.violations) for outcome in mine),
                "recovery_seconds_median": median(recovery),
                "recovery_seconds_longest": max(recovery),
                "added_step_seconds_longest": max(outcome.added_step_seconds for outcome in mine),
                "steps": sum(outcome.steps for outcome in mine),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        "| fault | injected | violations | time to recover, median / longest, s | longest added step time, s |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        added = "its own" if row["kind"] in RANKS_STRUCK else f"{row['added_step_seconds_longest']:.2f}"
        lines.append(
            f"| {row['kind']} | {row['injected']} | {row['violations']} | {row['recovery_seconds_median']:.1f} / "
            f"{row['recovery_seconds_longest']:.1f} | {added} |"
        )
    return "\n".join(lines)
