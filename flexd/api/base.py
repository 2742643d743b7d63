"""The base classes and shared types of the API models, errors, and how a command shows a field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from flexd.api.families import Family
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

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MAX_REASON_CHARACTERS = 500
MAX_WHO_CHARACTERS = 200
REQUEST_HEADER = "x-requested-with"
"""Required, with any value, of every request but GET, HEAD and OPTIONS: no page can make a browser send it to another
site without a permission, which the daemon never gives."""

TierName = Literal["HOME", "NODE", "DEVICE"]
TIERS: tuple[TierName, ...] = ("HOME", "NODE", "DEVICE")
"""In the order of ``flexd.core.layout.Tier``."""
RowsByTier = dict[TierName, int]
Share = Annotated[float, Field(ge=0, le=1)]
Reason = Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)]
Who = Annotated[str, Field(max_length=MAX_WHO_CHARACTERS)]


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite_or_none)]
"""A number that may be unknown: NaN and infinities, which JSON cannot express, become null."""


@dataclass(frozen=True)
class Show:
    """The way in which the command line shows a field, in its annotation.

    Attributes:
        title: heading; empty for the name of the field without its unit.
        unit: formats a value; None follows from the name.
        hidden: not shown: ``-o json`` has it.
        always: shown although it has its default.
        detail: a fact, no column of a table.
        brief: of a resource only its facts, without details.
    """

    title: str = ""
    unit: Callable[[Any], str] | None = None
    hidden: bool = False
    always: bool = False
    detail: bool = False
    brief: bool = False


HIDDEN = Show(hidden=True)
DETAIL = Show(detail=True)
ALWAYS = Show(always=True)


class Model(BaseModel):
    """A resource or a part of one.

    Unknown fields are ignored, so that an older command line reads a newer daemon. Validators are built when a model
    is first used, because a command uses a few of sixty.

    Attributes:
        FAMILIES: metric families of the model itself.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="ignore", use_attribute_docstrings=True)
    FAMILIES: ClassVar[tuple[Family, ...]] = ()

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the model and of its parts."""
        yield from (family.of(self) for family in self.FAMILIES)
        for part in (getattr(self, name) for name in type(self).model_fields):
            if isinstance(part, Model):
                yield from part.metrics()

    @classmethod
    def from_object(cls, source: object, /, **fields: Any) -> Self:
        """Build the model from the attributes of ``source`` that have its fields' names; ``fields`` take precedence.

        Raises:
            AttributeError: a field has neither, so that a renamed attribute never becomes a silent default.
        """
        return cls(**{name: getattr(source, name) for name in cls.model_fields if name not in fields}, **fields)


class RequestBody(BaseModel):
    """The body of a request. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CommandRequest(RequestBody):
    """The body of a command."""

    reason: Reason = ""
    """Recorded."""
    who: Who = ""
    """The person or program that sends the request; recorded."""


def build_models() -> None:
    """Build the remaining validators before several threads use them: only newer pydantic does that under a lock."""
    waiting = Model.__subclasses__()
    while waiting:
        model = waiting.pop()
        model.model_rebuild()
        waiting += model.__subclasses__()


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
