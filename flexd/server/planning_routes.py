"""Routes of proposals and of the throttle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Path, Query, Response

from flexd.api.affinity import MAX_PAGE_USERS, UserNodePage
from flexd.api.interface import PlanningApi
from flexd.api.plan import PlanReport
from flexd.api.planning import ProposalList
from flexd.api.replan import ApplyRequest, ReplanResult, replan_status
from flexd.api.throttle import ThrottleRequest, ThrottleStatus
from flexd.server.access import requester
from flexd.server.routing import VERB_ERRORS, SlowCalls, json_response, refusal

_NO_SUCH: dict[int | str, dict[str, object]] = {
    **VERB_ERRORS,
    404: refusal("No such proposal is kept."),
}
PlanId = Annotated[str, Path(max_length=100)]


def add_planning(app: FastAPI, planning: Callable[[], PlanningApi], slow: SlowCalls) -> None:
    """Add the routes. ``planning`` is called at every request, because a daemon with other tables may replace it."""

    @app.get("/v1/proposals", response_model=ProposalList, responses=VERB_ERRORS)
    def proposals() -> Response:
        """The plans that are kept and can be applied."""
        return json_response(planning().proposals())

    @app.get("/v1/proposals/{plan_id}", response_model=PlanReport, responses=_NO_SUCH)
    def proposal(plan_id: PlanId) -> Response:
        """One kept plan; ``latest`` is the newest."""
        return json_response(planning().proposal(plan_id))

    @app.post(
        "/v1/proposals/{plan_id}/apply",
        response_model=ReplanResult,
        responses={**_NO_SUCH, 202: {"model": ReplanResult, "description": "The migration is still running."}},
    )
    def apply(plan_id: PlanId, request: ApplyRequest) -> Response:
        """Carries a kept plan out, if ranks, placement and accesses are still those it was made for."""
        with slow.one():
            result = planning().apply(
                plan_id, request.reason, request.wait_seconds, force=request.force, who=requester(request.who)
            )
        return json_response(result, replan_status(result))

    @app.get("/v1/affinity/users", response_model=UserNodePage, responses=VERB_ERRORS)
    def user_nodes(
        offset: Annotated[int, Query(ge=0, le=2**40)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE_USERS)] = MAX_PAGE_USERS,
    ) -> Response:
        """The node in which the samples of each user are best trained, ascending by user id."""
        with slow.one():
            return json_response(planning().user_nodes(offset, limit))

    @app.get("/v1/throttle", response_model=ThrottleStatus, responses=VERB_ERRORS)
    def throttle() -> Response:
        """The limits on migrations and their state."""
        return json_response(planning().throttle())

    @app.post("/v1/throttle", response_model=ThrottleStatus, responses=VERB_ERRORS)
    def set_throttle(request: ThrottleRequest) -> Response:
        """Changes the throttle from the next chunk on, until ``control.throttle`` changes in the configuration."""
        status = planning().set_throttle(
            request.bytes_per_step, request.bytes_per_second, request.adaptive, reason=request.reason,
            who=requester(request.who),
        )  # fmt: skip
        return json_response(status)
