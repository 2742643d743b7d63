"""The routes of the API as FastAPI serves them: responses, documented errors, and a limit on slow calls."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

from fastapi import Body, FastAPI, Path, Query, Response
from pydantic import BaseModel

from flexd.api.errors import ErrorBody
from flexd.api.routes import ROUTES, DaemonApi, Route
from flexd.core.errors import ApiError
from flexd.server.access import requester

MAX_SLOW_CALLS = 8
"""Plans and waits for migrations at one time: they hold a thread each, and the probes need threads too."""

_ERROR_BODY = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}


def refusal(description: str) -> dict[str, object]:
    """Return a documented response whose body is an ``ErrorBody``.

    Named by reference: FastAPI builds a validator for each model of each route, 200 of them, at every start.
    """
    return {"description": description, "content": _ERROR_BODY}


ERRORS: dict[int | str, dict[str, object]] = {
    # This entry puts ErrorBody among the document's components.
    401: {"model": ErrorBody, "description": "No bearer token where one is needed, or one that is not known."},
    403: refusal(
        "The sender may only read or do nothing, or the request comes from a web page or by a foreign host name."
    ),
    429: refusal("Too many plans and waits at one time."),
    500: refusal("A fault of the daemon."),
    503: refusal("The daemon cannot do it at present."),
}
VERB_ERRORS: dict[int | str, dict[str, object]] = {
    **ERRORS,
    400: refusal("The request was cut off, or its body is no JSON."),
    408: refusal("The body did not arrive in time."),
    409: refusal("The state of the daemon, the stream or the ranks does not allow it."),
    413: refusal("The body is too large."),
    422: refusal("The body is not what the verb takes."),
}


class SlowCalls:
    """A bound on calls that hold a thread for long; a caller beyond it is refused instead of queued."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = threading.BoundedSemaphore(limit)

    @contextmanager
    def one(self) -> Iterator[None]:
        if not self._free.acquire(blocking=False):
            raise ApiError(
                f"{self._limit} plans or waits are running already", status=429, remedy="try again in a moment"
            )
        try:
            yield
        finally:
            self._free.release()


def json_response(model: BaseModel, status_code: int = 200) -> Response:
    return Response(model.model_dump_json(), status_code=status_code, media_type="application/json")


def add_routes(app: FastAPI, api: DaemonApi) -> None:
    """Serve every route of ``flexd.api.routes``."""
    slow = SlowCalls(MAX_SLOW_CALLS)
    for route in ROUTES:
        responses = dict(VERB_ERRORS)
        if route.missing:
            responses[404] = refusal(route.missing)
        if route.waits:
            responses[202] = {"model": route.answer, "description": "What it started goes on."}
        app.add_api_route(
            route.path, _endpoint(route, api, slow), methods=[route.method], response_model=route.answer,
            responses=responses, description=route.text,
        )  # fmt: skip


def _endpoint(route: Route[Any], api: DaemonApi, slow: SlowCalls) -> Callable[..., Response]:
    def endpoint(**given: Any) -> Response:
        given.update(given.pop("request", ()))
        if "who" in given:
            given["who"] = requester(given["who"])
        with slow.one() if route.slow else nullcontext():
            # Looked up at every request, because a daemon with other tables may replace another.
            result = api.handler(route.handler)(**given)
        going_on = route.waits and result.outcome in ("accepted", "timed_out")
        return json_response(result, 202 if going_on else 200)

    endpoint.__name__ = route.handler.replace(".", "_")
    # What FastAPI reads: the parameters of the path, and the request.
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, kind, annotation=Annotated[str, Path(max_length=200)]) for name in route.parameters
    ]
    if route.request is not None:
        needed = any(field.is_required() for field in route.request.model_fields.values())
        default = inspect.Parameter.empty if needed or route.method == "GET" else route.request()
        source = Query() if route.method == "GET" else Body()
        parameters.append(
            inspect.Parameter("request", kind, annotation=Annotated[route.request, source], default=default)
        )
    endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return endpoint
