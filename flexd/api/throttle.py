"""How fast rows may migrate, as the admin API tells and takes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flexd.api.base import CommandRequest, FiniteOrNone, Model


class StepTimeReport(Model):
    """Seconds of a training step, over the reports of all ranks."""

    p50_seconds: FiniteOrNone = None
    """Median."""
    p90_seconds: FiniteOrNone = None
    """Nine of ten are quicker."""


class ThrottleStatus(Model):
    """What holds a migration back. Bytes are of row values and optimizer state copied."""

    bytes_per_step: int | None = None
    """Asked for, at one step boundary of every rank; null: no limit but the ranks' own."""
    bytes_per_second: int | None = None
    """Asked for, in the long run; null: no limit."""
    adaptive: bool = False
    """Whether step times slow it down further."""
    effective_bytes_per_step: int | None = None
    """In effect now."""
    state: Literal["measuring", "running", "paused"] | None = None
    """Of the adaptive controller; null if it is off."""
    why: str | None = None
    """Its newest decision."""
    waits_for: Literal["bytes_per_step", "bytes_per_second", "adaptive_pause"] | None = None
    """What the next chunk waits for; null if for nothing."""
    waiting_seconds: dict[str, float] = Field(default_factory=dict)
    """In which a chunk was held, by what it waited for, since the daemon started."""
    released_bytes: int = 0
    """Let go since the daemon started."""
    baseline: StepTimeReport | None = None
    """Steps without a migration; null if not known yet."""
    recent: StepTimeReport | None = None
    """Steps of the newest judgement, while chunks were applied; null before the first."""
    decisions: dict[Literal["slowed", "sped", "paused"], int] = Field(default_factory=dict)
    """Of the adaptive controller since the daemon started."""


class ThrottleRequest(CommandRequest):
    """Body of ``POST /v1/throttle``. Settings that are left out stay unchanged."""

    bytes_per_step: Annotated[int, Field(ge=0, le=2**50)] | None = None
    """At one step boundary of every rank; 0 lifts the limit."""
    bytes_per_second: Annotated[int, Field(ge=0, le=2**50)] | None = None
    """In the long run; 0 lifts the limit."""
    adaptive: bool | None = None
    """Whether step times slow migrations down further."""
