"""The admin API as a FastAPI application, its status page, and the read-only one for the metrics listener."""

import base64
import hashlib
import inspect
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Body, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import flexd
from flexd.api.base import REQUEST_HEADER, ErrorBody, ErrorDetail, ProbeResult, http_status
from flexd.api.rank import RankPage
from flexd.api.routes import RANKS, ROUTES, DaemonApi, Operation
from flexd.core.errors import ApiError, FlexdError
from flexd.core.model import MAX_LABEL_VALUES, build_models, counter, with_zeros
from flexd.server.access import REFUSED_REASONS, RequestGuard, requester

REFUSED = counter(
    "flexd_api_refused_requests", "Requests of the admin API refused, by reason.", lambda counts: counts, ("reason",)
)


class Metrics(Collector):
    """The page of one daemon. Its registry is its own, so that nothing else in the process shows up.

    Attributes:
        refused: counts requests that the admin API has refused, by reason.

    Args:
        api: read once per scrape, from an HTTP thread.
    """

    def __init__(self, api: DaemonApi) -> None:
        self._api = api
        self.refused: Counter[str] = Counter()
        # It does not collect at registration, when the daemon is not up yet.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return (page, content type): OpenMetrics if the ``Accept`` header requests it, else Prometheus text."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of the daemon's status, its ranks and its API; keep nothing between scrapes."""
        yield from self._api.status().metrics()
        try:
            ranks = self._api.call(RANKS, offset=0, limit=MAX_LABEL_VALUES)
        except ApiError:  # A daemon that waits for its state or its tables has no ranks.
            ranks = RankPage()
        yield from ranks.metrics()
        yield REFUSED.of(with_zeros(REFUSED_REASONS, self.refused))


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


def _endpoint(route: Operation[Any], api: DaemonApi, slow: SlowCalls) -> Callable[..., Response]:
    def endpoint(**given: Any) -> Response:
        given.update(given.pop("request", ()))
        if "requested_by" in given:
            given["requested_by"] = requester(given["requested_by"])
        with slow.one() if route.slow else nullcontext():
            result = api.call(route, **given)
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


INLINED = ("uPlot.iife.min.js", "uPlot.min.css")
"""Files of ``vendor/uplot``; each replaces the comment of its name in the page."""
_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def add_page(app: FastAPI) -> None:
    """Serve the page at ``/``. It reads the admin API with the token that the user types in."""

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        text, policy = _page()
        headers = {
            "content-security-policy": policy,
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
        }
        return Response(text, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """Return the HTML and its Content-Security-Policy: scripts and styles by their digests, nothing else."""
    folder = files("flexd.server")
    text = folder.joinpath("status_page.html").read_text(encoding="utf-8")
    for name in INLINED:
        vendored = folder.joinpath("vendor", "uplot", name).read_text(encoding="utf-8")
        text = text.replace(f"/* {name} */", vendored.strip())
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, body in _PARTS.findall(text):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
    policy = (
        f"default-src 'none'; script-src {' '.join(digests['script'])}; style-src {' '.join(digests['style'])}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


_log = logging.getLogger(__name__)


def create_app(api: DaemonApi, metrics: Metrics, *, loopback_only: bool = True) -> FastAPI:
    """Return the whole admin API.

    Args:
        loopback_only: refuse other host names than loopback's; false on a unix socket and beyond loopback.
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
    app.add_middleware(RequestGuard, loopback_only=loopback_only, refused=metrics.refused)
    return app


def create_metrics_app(api: DaemonApi, metrics: Metrics) -> FastAPI:
    """Return ``/metrics``, ``/healthz`` and ``/readyz`` alone, which may be reached from other machines."""
    app = FastAPI(title="flexd metrics", version=flexd.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_handlers(app)
    _add_probes(app, api, metrics)
    app.add_middleware(RequestGuard, loopback_only=False, refused=Counter())
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
        return _failure(type(error).__name__, error.message, error.remedy, http_status(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors()[:8]
        )
        return _failure("RequestError", faults[:2000], "see /openapi.json", 422)

    @app.exception_handler(HTTPException)
    async def no_such_thing(_: Request, error: HTTPException) -> Response:
        response = _failure("HttpError", str(error.detail), "see /openapi.json", error.status_code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        # The traceback goes to the log (the listener records what is re-raised after this response), not to the caller.
        return _failure("InternalError", f"the daemon failed: {type(error).__name__}", "see the daemon's log", 500)


def _failure(kind: str, message: str, remedy: str, status: int) -> Response:
    return json_response(ErrorBody(error=ErrorDetail(type=kind, message=message, remedy=remedy)), status)
