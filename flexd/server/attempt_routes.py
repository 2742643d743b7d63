"""Routes of the job's attempts."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Response

from flexd.api.attempt import AttemptList, AttemptRequest, AttemptResult
from flexd.api.interface import AttemptsApi
from flexd.server.access import requester
from flexd.server.routing import VERB_ERRORS, json_response, refusal

_NO_SUCH: dict[int | str, dict[str, object]] = {**VERB_ERRORS, 404: refusal("No such attempt is known.")}


def add_attempts(app: FastAPI, attempts: Callable[[], AttemptsApi]) -> None:
    """Add the routes. ``attempts`` is called at every request, because a daemon with other tables may replace it."""

    @app.get("/v1/attempts", response_model=AttemptList, responses=VERB_ERRORS)
    def listed() -> Response:
        """The attempt that holds the job, those that wait for it, and those that ended."""
        return json_response(attempts().attempts())

    @app.post("/v1/attempts/prefer", response_model=AttemptResult, responses=_NO_SUCH)
    def prefer(request: AttemptRequest) -> Response:
        """Gives the job to this attempt, although the ranks of the present one are alive."""
        return json_response(attempts().prefer(request.attempt, request.reason, requester(request.who)))

    @app.post("/v1/attempts/forget", response_model=AttemptResult, responses=_NO_SUCH)
    def forget(request: AttemptRequest) -> Response:
        """Drops what is known of an attempt. One whose ranks hold the job is refused with 409."""
        return json_response(attempts().forget(request.attempt, request.reason, requester(request.who)))
