"""What the routes of the admin API share: how they answer, what they may fail with, how many may be slow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Response
from pydantic import BaseModel

from flexd.errors import ApiError
from flexd.server.answers import ErrorBody

MAX_SLOW_CALLS = 8
"""Plans and waits for migrations at one time: they hold a thread each, and the probes need threads too."""

ERRORS: dict[int | str, dict[str, object]] = {
    401: {"model": ErrorBody, "description": "No bearer token where one is needed, or one that is not known."},
    403: {
        "model": ErrorBody,
        "description": "The sender may only read or do nothing, or the request comes from a web page or by a foreign "
        "host name.",
    },
    429: {"model": ErrorBody, "description": "Too many requests, or too many plans and waits, at one time."},
    500: {"model": ErrorBody, "description": "A fault of the daemon."},
    503: {"model": ErrorBody, "description": "The daemon cannot do it at present."},
}
VERB_ERRORS: dict[int | str, dict[str, object]] = {
    **ERRORS,
    400: {"model": ErrorBody, "description": "The request was cut off, or its body is no JSON."},
    408: {"model": ErrorBody, "description": "The body did not arrive in time."},
    409: {"model": ErrorBody, "description": "The state of the daemon, the stream or the ranks does not allow it."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    422: {"model": ErrorBody, "description": "The body is not what the verb takes."},
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


def json_answer(model: BaseModel, status_code: int = 200) -> Response:
    return Response(model.model_dump_json(), status_code=status_code, media_type="application/json")
