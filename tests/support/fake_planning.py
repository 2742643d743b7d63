"""Proposals and a throttle of a daemon that is not there."""

from __future__ import annotations

from collections.abc import Callable

from flexd.api.execution import ReplanResult
from flexd.api.plan import PlanReport, ShareRangeReport, UserNodePage
from flexd.api.planning import GateReport, ProposalList, ProposalReport
from flexd.api.throttle import ThrottleStatus
from flexd.core.errors import ApiError

KEPT = ProposalReport(
    plan_id="p7", created_unix_seconds=1_700_000_000.0, trigger="drift", reason="drift 1.20 > 1.05 (table items)",
    promotions=3, demotions=1, migration_bytes=4096, saved_seconds=0.001,
)  # fmt: skip
SEEN = ProposalReport(
    plan_id="p6", trigger="manual", reason="dry run", dry_run=True, promotions=2, closed_gates=("samples",),
    outdated="the ranks have changed",
)  # fmt: skip
USERS = (-4, 1, 5, 8, 9, 40, 2**62)


class FakePlanning:
    """Calls ``entered`` with its name and arguments first, which may raise."""

    def __init__(self, entered: Callable[..., None], outcome: Callable[[], str]) -> None:
        self._entered = entered
        self._outcome = outcome
        self._throttle = ThrottleStatus(bytes_per_step=1 << 20)

    def proposals(self) -> ProposalList:
        self._entered("proposals")
        return ProposalList(proposals=(KEPT, SEEN))

    def proposal(self, plan_id: str) -> PlanReport:
        self._entered("proposal", plan_id)
        if plan_id not in ("latest", "p7"):
            raise ApiError(f"no proposal {plan_id!r}", status=404, remedy="proposals: p6, p7")
        gate = GateReport(
            gate="samples", key="planner.min_samples", measured=10, required=20, open=False, message="thin"
        )
        return PlanReport(plan_id="p7", trigger="drift", requested_by="flexd", gates=(gate,))

    def apply(self, plan_id: str, reason: str, wait_seconds: float, *, force: bool, requested_by: str) -> ReplanResult:
        self._entered("apply", plan_id, reason, wait_seconds, force, requested_by)
        return ReplanResult(outcome=self._outcome(), plan=self.proposal(plan_id))

    def user_nodes(self, offset: int, limit: int) -> UserNodePage:
        """Return three users at most."""
        self._entered("user_nodes", offset, limit)
        page = slice(offset, offset + min(limit, 3))
        return UserNodePage(
            learnt=1, nodes=2, users=7, ids=USERS[page], nodes_of=tuple(user % 2 for user in USERS[page]),
            by_user=ShareRangeReport(expected=0.9, low=0.8, high=1.0),
        )  # fmt: skip

    def throttle(self) -> ThrottleStatus:
        self._entered("throttle")
        return self._throttle

    def set_throttle(
        self, bytes_per_step: int | None, bytes_per_second: int | None, *, reason: str = "", requested_by: str = ""
    ) -> ThrottleStatus:
        self._entered("set_throttle", bytes_per_step, bytes_per_second, reason, requested_by)
        asked = {"bytes_per_step": bytes_per_step, "bytes_per_second": bytes_per_second}
        changes = {name: value or None for name, value in asked.items() if value is not None}
        self._throttle = self._throttle.model_copy(update=changes)
        return self._throttle
