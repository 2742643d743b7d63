"""The throttle: how fast rows may migrate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from flexd.api.base import CommandRequest
from flexd.core.families import counter, gauge
from flexd.core.model import Model

if TYPE_CHECKING:
    from flexd.control.daemon.throttle import Throttle

WaitName = Literal["bytes_per_step", "bytes_per_second"]


class ThrottleStatus(Model):
    """The limits on migrations and their state. Bytes are of row values and optimizer state copied; counters run since
    the daemon started."""

    bytes_per_step: int | None = None
    """Limit at one step boundary of every rank; null: no limit but the ranks' own."""
    bytes_per_second: int | None = None
    """Limit in the long run; null: no limit."""
    waits_for: WaitName | None = None
    """Limit that holds the next chunk; null if none does."""
    waiting_seconds: dict[WaitName, float] = Field(default_factory=dict)
    """Time in which a chunk was held, by what it waited for."""
    released_bytes: int = 0
    """Bytes released to the ranks."""
    released_chunks: int = 0
    """Chunks released to the ranks."""

    FAMILIES = (
        gauge("flexd_throttle_bytes_per_step", "Limit; NaN: the ranks' own alone.", "bytes_per_step"),
        gauge("flexd_throttle_bytes_per_second", "Limit; NaN without one.", "bytes_per_second"),
        counter("flexd_throttle_released_bytes", "Row values and state released.", "released_bytes"),
        counter(
            "flexd_throttle_waiting_seconds", "Time in which a chunk was held, by what it waited for.",
            "waiting_seconds", ("wait",),
        ),
    )  # fmt: skip


class ThrottleRequest(CommandRequest):
    """Body of ``POST /v1/throttle``. Settings that are left out stay unchanged."""

    bytes_per_step: Annotated[int, Field(ge=0, le=2**50)] | None = None
    """At one step boundary of every rank; 0 lifts the limit."""
    bytes_per_second: Annotated[int, Field(ge=0, le=2**50)] | None = None
    """In the long run; 0 lifts the limit."""


def throttle_status(throttle: Throttle) -> ThrottleStatus:
    """Return the limits on migrations and their state."""
    now = throttle.snapshot()
    return ThrottleStatus.from_object(
        now,
        **vars(throttle.limits),
        waits_for=None if now.waits_for is None else now.waits_for.value,
        waiting_seconds={reason.value: seconds for reason, seconds in now.waiting_seconds.items()},
    )
