"""What the HTTP side needs to show and apply proposals, and to throttle migrations."""

from __future__ import annotations

from typing import Protocol

from flexd.server.plan_report import PlanReport
from flexd.server.planning_report import ProposalList
from flexd.server.throttle_report import ThrottleStatus
from flexd.server.verbs import ReplanResult


class PlanningApi(Protocol):
    """Called from several HTTP threads at once.

    Raises (every method):
        ApiError: this daemon plans nothing (a follower: 409).
    """

    def proposals(self) -> ProposalList:
        """The kept plans, newest first."""
        ...

    def proposal(self, plan_id: str) -> PlanReport:
        """A kept plan; ``latest`` is the newest.

        Raises:
            ApiError: none of that id is kept (404).
        """
        ...

    def apply(self, plan_id: str, reason: str, wait_seconds: float, *, force: bool, who: str) -> ReplanResult:
        """Carries a kept plan out; waits and answers as ``DaemonApi.replan``.

        Args:
            force: also if it was made from too little.

        Raises:
            PlanError: ranks, placement or accesses have moved on since it was made, or it was made from too little.
            ApiError: none of that id is kept (404), paused (409), or shutting down (503).
        """
        ...

    def throttle(self) -> ThrottleStatus:
        """What holds migrations back."""
        ...

    def set_throttle(
        self,
        bytes_per_step: int | None,
        bytes_per_second: int | None,
        adaptive: bool | None,
        *,
        reason: str = "",
        who: str = "",
    ) -> ThrottleStatus:
        """Changes it from the next chunk on: None keeps a setting, 0 lifts a limit. It outlives the daemon."""
        ...
