"""Shared parts of the routes: responses, documented errors, and a limit on slow calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Response
from pydantic import BaseModel

from flexd.api.errors import ErrorBody
from flexd.core.errors import ApiError

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
