"""Requests of the API, shared types of its models, and errors."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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
from flexd.core.model import Model

REQUEST_HEADER = "x-requested-with"
"""Required, with any value, of every request but GET, HEAD and OPTIONS: no page can make a browser send it to another
site without a permission, which the daemon never gives."""

TierName = Literal["HOME", "NODE", "DEVICE"]
TIERS: tuple[TierName, ...] = ("HOME", "NODE", "DEVICE")
"""In the order of ``flexd.core.placement.Tier``."""
RowsByTier = dict[TierName, int]
Reason = Annotated[str, Field(max_length=500)]
RequestedBy = Annotated[str, Field(max_length=200)]


class RequestBody(BaseModel):
    """The body of a request. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CommandRequest(RequestBody):
    """The body of a command."""

    reason: Reason = ""
    """Recorded."""
    requested_by: RequestedBy = ""
    """The person or program that sends the request; recorded."""


class ProbeResult(Model):
    """Response of ``/healthz`` and ``/readyz``."""

    ok: bool
    """HTTP status 200 if true, 503 if not."""
    reasons: tuple[str, ...] = ()


class ErrorDetail(Model):
    """One error."""

    type: str
    message: str
    remedy: str = ""


class ErrorBody(Model):
    """Body of every response with a status of 400 or above, except those of the probes."""

    error: ErrorDetail


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
