"""Protocol of a baseline strategy."""

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
        """Project that uses it, or paper and section."""
        ...

    def evaluate(self, case: PlanningProblem) -> BaselineResult:
        """Return the best result of this strategy. A problem that it cannot solve is a result too, not an error."""
        ...
