"""What a strategy is."""

from __future__ import annotations

from typing import Protocol

from flexd.planner.baselines.problem import BaselineResult, PlanningProblem


class Baseline(Protocol):
    """One strategy. Implementations are frozen and deterministic (but for the time limit of a solver)."""

    @property
    def name(self) -> str:
        """Key in tables and summaries."""
        ...

    @property
    def source(self) -> str:
        """Who does it, or the paper and section."""
        ...

    def evaluate(self, case: PlanningProblem) -> BaselineResult:
        """The best that this strategy does with the case. A case it cannot do is an outcome, not an error."""
        ...
