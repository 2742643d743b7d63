"""Responses that belong to no resource: probes and errors, and the HTTP status of each error."""

from __future__ import annotations

from flexd.api.base import Model
from flexd.core.errors import (
    ApiError,
    ConfigError,
    ControlError,
    FlexdError,
    PlacementError,
    PlanError,
    SnapshotError,
    StreamError,
    TopologyError,
)


class ProbeResult(Model):
    """Response of ``/healthz`` and ``/readyz``."""

    ok: bool
    """HTTP status 200 if true, 503 if not."""
    reasons: tuple[str, ...] = ()
    """Reasons for a negative result."""


class ErrorDetail(Model):
    """One error."""

    type: str
    """Class of the error."""
    message: str
    """The fault and its place."""
    remedy: str = ""
    """Advice to the reader."""


class ErrorBody(Model):
    """Body of every response with a status of 400 or above, except those of the probes."""

    error: ErrorDetail
    """The error."""


_STATUS_OF: tuple[tuple[type[FlexdError], int], ...] = (
    (ConfigError, 422),
    (PlanError, 409),
    (PlacementError, 409),
    (TopologyError, 409),
    (ControlError, 503),
    (StreamError, 503),
    (SnapshotError, 503),
)


def http_status(error: FlexdError) -> int:
    """Return the HTTP status of the response to an error."""
    if isinstance(error, ApiError):
        return error.status if 400 <= error.status <= 599 else 500
    return next((status for kind, status in _STATUS_OF if isinstance(error, kind)), 500)


def error_body(error: FlexdError) -> ErrorBody:
    """Return the body of the response to an error."""
    return ErrorBody(error=ErrorDetail(type=type(error).__name__, message=error.message, remedy=error.remedy))
