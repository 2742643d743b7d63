"""The admin API as a FastAPI application, and the read-only one for the metrics listener."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import flexd
from flexd.api.base import REQUEST_HEADER, build_models
from flexd.api.errors import ErrorBody, ErrorDetail, ProbeResult, error_body, http_status
from flexd.api.routes import DaemonApi
from flexd.core.errors import FlexdError
from flexd.server.guard import RequestGuard
from flexd.server.metrics import Metrics
from flexd.server.page import add_page
from flexd.server.routing import ERRORS, add_routes, json_response

_log = logging.getLogger(__name__)


def create_app(
    api: DaemonApi,
    metrics: Metrics,
    *,
    loopback_only: bool = True,
    on_refused: Callable[[str], None] = lambda _: None,
) -> FastAPI:
    """Return the whole admin API.

    Args:
        loopback_only: refuse other host names than loopback's; false on a unix socket and beyond loopback.
        on_refused: called with the reason of each request that ``RequestGuard`` refuses.
    """
    build_models()
    app = FastAPI(
        title="flexd",
        version=flexd.__version__,
        description="Admin API of the flexd daemon. On loopback or a unix socket; beyond, with TLS and tokens or "
        f"client certificates. Every POST needs the header {REQUEST_HEADER}, with any value.",
        docs_url=None,
        redoc_url=None,
    )
    _add_error_handlers(app)
    _add_probes(app, api, metrics)
    add_page(app)
    add_routes(app, api)
    app.add_middleware(RequestGuard, loopback_only=loopback_only, on_refused=on_refused)
    return app


def create_metrics_app(api: DaemonApi, metrics: Metrics) -> FastAPI:
    """Return ``/metrics``, ``/healthz`` and ``/readyz`` alone, which may be reached from other machines."""
    app = FastAPI(title="flexd metrics", version=flexd.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_handlers(app)
    _add_probes(app, api, metrics)
    app.add_middleware(RequestGuard, loopback_only=False, linked_paths=frozenset())
    return app


def _add_probes(app: FastAPI, api: DaemonApi, metrics: Metrics) -> None:
    def probe(check: Callable[[], ProbeResult]) -> Response:
        try:
            result = check()
        except Exception as error:
            # A probe that fails is negative, not a fault of the caller; the kubelet acts on the status alone.
            _log.exception("probe failed")
            result = ProbeResult(ok=False, reasons=(f"{type(error).__name__}: {error}",))
        return json_response(result, 200 if result.ok else 503)

    responses: dict[int | str, dict[str, object]] = {503: {"model": ProbeResult, "description": "No; with reasons."}}

    # The probes are coroutines (and never block) so that they respond even when every worker thread is busy.
    @app.get("/healthz", response_model=ProbeResult, responses=responses)
    async def healthz() -> Response:
        """Liveness: 503 if the daemon's loop does not tick and it must be restarted."""
        return probe(api.health)

    @app.get("/readyz", response_model=ProbeResult, responses=responses)
    async def readyz() -> Response:
        """Readiness: 503 if the daemon is not useful now."""
        return probe(api.ready)

    @app.get("/metrics", response_class=Response, responses={**ERRORS, 200: {"content": {"text/plain": {}}}})
    def metrics_page(request: Request) -> Response:
        """Prometheus text or OpenMetrics, as the ``Accept`` header requests."""
        page, content_type = metrics.render(request.headers.get("accept", ""))
        # Starlette would append a second charset to media_type.
        return Response(page, headers={"content-type": content_type})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(FlexdError)
    async def refused(_: Request, error: FlexdError) -> Response:
        return json_response(error_body(error), http_status(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors()[:8]
        )
        detail = ErrorDetail(type="RequestError", message=faults[:2000], remedy="see /openapi.json")
        return json_response(ErrorBody(error=detail), 422)

    @app.exception_handler(HTTPException)
    async def no_such_thing(_: Request, error: HTTPException) -> Response:
        detail = ErrorDetail(type="HttpError", message=str(error.detail), remedy="see /openapi.json")
        response = json_response(ErrorBody(error=detail), error.status_code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        # The traceback goes to the log (the listener records what is re-raised after this response), not to the caller.
        detail = ErrorDetail(
            type="InternalError", message=f"the daemon failed: {type(error).__name__}", remedy="see the daemon's log"
        )
        return json_response(ErrorBody(error=detail), 500)
