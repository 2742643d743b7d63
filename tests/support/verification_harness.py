"""Verification over a fake coordinator whose ranks report step times that depend on the placement and on the load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from flexd.control.protocol.report import StepReport
from flexd.core.layout import Tier
from flexd.operations.autoplan import AutoPlanner
from flexd.operations.decisions import DecisionFile
from flexd.operations.history.records import ActionRecord, VerdictRecord
from flexd.operations.verification import Verification, Verifier
from tests.support.planning_harness import PlanningHarness, filled_harness

STEP_SECONDS = 0.1


class VerifiedJob:
    """A job of four ranks and its automatic planner.

    Args:
        effect: change of the step time by the copies of the first plan, as a share.
        load: factor of the step time, by step.
    """

    def __init__(
        self,
        directory: Path,
        effect: float,
        load: Callable[[int], float] = lambda step: 1.0,
        seed: int = 0,
        planner: dict[str, Any] | None = None,
        **verify: Any,
    ) -> None:
        settings = {"enabled": True, **verify}
        self.directory = directory
        self.it: PlanningHarness = filled_harness(
            directory, min_spacing_seconds=0.0, verify=settings, **(planner or {})
        )
        self.it.coordinator.obedient = True
        self.rng = np.random.default_rng(seed)
        self.effect, self.load = effect, load
        self.step = 0
        self._most_copies = 1
        self.actions: list[ActionRecord] = []
        self.verdicts: list[VerdictRecord] = []
        self.start()

    def start(self) -> None:
        """Start a daemon over the files of the one before."""
        history: Any = SimpleNamespace(
            record_action=self.actions.append, record_verdict=self.verdicts.append,
            newest_verdict=lambda: self.verdicts[-1] if self.verdicts else None,
        )  # fmt: skip
        drift: Any = SimpleNamespace(pop_reason=lambda: None)
        self.decisions = DecisionFile(self.directory / "decisions.json")
        self.verifier = Verifier(
            self.it.config.planner, self.it.config.keyspace(), self.it.planning.executions,
            self.it.coordinator, self.decisions, history, coin=lambda: bool(self.rng.integers(2)),
        )  # fmt: skip
        self.auto = AutoPlanner(
            self.it.config.planner, self.it.planning, drift, self.it.coordinator.live, verifier=self.verifier
        )

    def report(self) -> None:
        """Let every rank report one step."""
        self.step += 1
        now = self.it.coordinator.now
        copied = float(len(now)) / max(1, self.most_copies)
        seconds = STEP_SECONDS * self.load(self.step) * (1 + self.effect * copied)
        seconds *= 1 + 0.01 * float(self.rng.standard_normal())
        for rank in range(4):
            self.verifier.add(rank, StepReport(self.step, 1, now.version, 0, seconds, 0.0, (1, 0, 0)))

    @property
    def most_copies(self) -> int:
        """Most rows above HOME that a newest plan has listed so far."""
        plan = self.it.planning.last_plan
        self._most_copies = max(self._most_copies, 0 if plan is None else len(plan.target))
        return self._most_copies

    def tick(self, times: int = 1) -> None:
        """Report steps and tick the planner."""
        for _ in range(times):
            self.auto.tick()
            self.report()

    def verdict(self, steps: int = 4_000, *, after: Verification | None = None) -> Verification:
        """Run until the first verification, or the one ``after`` another, has ended, and return it."""
        for _ in range(steps):
            self.tick()
            newest = self.verifier.newest
            if newest is not None and newest != after and newest.state.value != "running":
                self.tick()
                return newest
        raise AssertionError(f"no verdict: {self.verifier.newest}")

    def device_rows(self) -> int:
        return int(np.count_nonzero(self.it.coordinator.now.tiers != Tier.HOME))
