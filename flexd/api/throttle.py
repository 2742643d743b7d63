"""The throttle: how fast rows may migrate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from flexd.api.base import CommandRequest, FiniteOrNone, Model
from flexd.api.families import counter, gauge

if TYPE_CHECKING:
    from flexd.operations.pacing import PacingSnapshot, StepQuantiles

WaitName = Literal["bytes_per_step", "bytes_per_second", "adaptive_pause"]
DecisionName = Literal["slowed", "sped", "paused"]


class StepTimeReport(Model):
    """Seconds of a training step, over the reports of all ranks."""

    p50_seconds: FiniteOrNone = None
    """Median."""
    p90_seconds: FiniteOrNone = None
    """90th percentile."""


class ThrottleStatus(Model):
    """The limits on migrations and their state. Bytes are of row values and optimizer state copied; counters run since
    the daemon started."""

    bytes_per_step: int | None = None
    """Requested limit at one step boundary of every rank; null: no limit but the ranks' own."""
    bytes_per_second: int | None = None
    """Requested limit in the long run; null: no limit."""
    adaptive: bool = False
    """True if step times slow migrations down further."""
    effective_bytes_per_step: int | None = None
    """Limit in effect now."""
    state: Literal["measuring", "running", "paused"] | None = None
    """State of the adaptive controller; null if it is off."""
    why: str | None = None
    """Newest decision of the adaptive controller."""
    waits_for: WaitName | None = None
    """Limit that holds the next chunk; null if none does."""
    waiting_seconds: dict[str, float] = Field(default_factory=dict)
    """Time in which a chunk was held, by what it waited for."""
    released_bytes: int = 0
    """Bytes released to the ranks."""
    released_chunks: int = 0
    """Chunks released to the ranks."""
    baseline: StepTimeReport | None = None
    """Steps without a migration; null if not known yet."""
    recent: StepTimeReport | None = None
    """Steps of the newest judgement, while chunks were applied; null before the first."""
    decisions: dict[DecisionName, int] = Field(default_factory=dict)
    """Decisions of the adaptive controller."""

    FAMILIES = (
        gauge(
            "flexd_throttle_bytes_per_step", "Limit in effect; NaN: the ranks' own alone.", "effective_bytes_per_step"
        ),
        gauge("flexd_throttle_bytes_per_second", "Limit; NaN without one.", "bytes_per_second"),
        gauge(
            "flexd_throttle_paused", "1 while the adaptive controller holds a chunk back.",
            lambda throttle: throttle.waits_for == "adaptive_pause",
        ),
        counter("flexd_throttle_released_bytes", "Row values and state released.", "released_bytes"),
        counter(
            "flexd_throttle_waiting_seconds", "Time in which a chunk was held, by what it waited for.",
            "waiting_seconds", ("wait",),
        ),
        counter("flexd_throttle_decisions", "Decisions of the adaptive controller.", "decisions", ("decision",)),
        gauge(
            "flexd_throttle_step_seconds",
            "Seconds of a training step without a migration and at the newest judgement of one; NaN if not known.",
            lambda throttle: {
                (steps, point): getattr(times or StepTimeReport(), f"{point}_seconds")
                for steps, times in (("without_migration", throttle.baseline), ("migrating", throttle.recent))
                for point in ("p50", "p90")
            },
            ("steps", "point"),
        ),
    )  # fmt: skip


class ThrottleRequest(CommandRequest):
    """Body of ``POST /v1/throttle``. Settings that are left out stay unchanged."""

    bytes_per_step: Annotated[int, Field(ge=0, le=2**50)] | None = None
    """At one step boundary of every rank; 0 lifts the limit."""
    bytes_per_second: Annotated[int, Field(ge=0, le=2**50)] | None = None
    """In the long run; 0 lifts the limit."""
    adaptive: bool | None = None
    """True if step times slow migrations down further."""


def throttle_status(pacing: PacingSnapshot) -> ThrottleStatus:
    """Return the limits on migrations and their state."""
    throttle = pacing.throttle
    return ThrottleStatus(
        bytes_per_step=pacing.limits.bytes_per_step,
        bytes_per_second=pacing.limits.bytes_per_second,
        adaptive=pacing.adaptive,
        effective_bytes_per_step=pacing.bytes_per_step,
        state=None if pacing.state is None else pacing.state.value,
        why=pacing.why or None,
        waits_for=None if throttle.waits_for is None else throttle.waits_for.value,
        waiting_seconds={reason.value: seconds for reason, seconds in throttle.waiting_seconds.items()},
        released_bytes=throttle.released_bytes,
        released_chunks=throttle.released_chunks,
        baseline=_step_times(pacing.baseline),
        recent=_step_times(pacing.recent),
        decisions={"slowed": pacing.slowed, "sped": pacing.sped, "paused": pacing.pauses},
    )


def _step_times(times: StepQuantiles | None) -> StepTimeReport | None:
    return None if times is None else StepTimeReport.from_object(times)
