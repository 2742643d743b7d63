"""The daemon on one screen: what ``GET /v1/status`` answers."""

from __future__ import annotations

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model, RowsByTier
from flexd.api.config import ConfigStatus
from flexd.api.drift import DriftStatus
from flexd.api.leadership import AvailabilityStatus
from flexd.api.migration import MigrationReport
from flexd.api.plan import PlanReport
from flexd.api.planning import PlanningStatus
from flexd.api.scale_out import ScaleOutStatus
from flexd.api.sketch import SketchStatus
from flexd.api.throttle import ThrottleStatus


class StreamStatus(Model):
    """The access stream as it is read now."""

    source: str
    """Kind of the source: ``file_log``, ``kafka``, ``synthetic`` or ``tap``."""
    lag_messages: int = 0
    """Messages in the stream that are not read yet."""
    messages_per_second: FiniteOrNone = None
    """Recent rate."""
    accesses_per_second: FiniteOrNone = None
    """Recent rate."""
    messages: int = 0
    """Messages read since the daemon started."""
    accesses: int = 0
    """Accesses counted since the daemon started."""
    rejected_messages: dict[str, int] = Field(default_factory=dict)
    """Messages not counted, by reason."""
    rejected_accesses: dict[str, int] = Field(default_factory=dict)
    """Accesses not counted inside good messages, by reason."""
    adjusted_accesses: dict[str, int] = Field(default_factory=dict)
    """Accesses counted by rule: ``late`` (older than ``sketch.late_after_seconds``, at their own time),
    ``future_clamped`` (dated too far ahead, as of the newest event)."""
    newest_event_unix_seconds: FiniteOrNone = None
    """Newest event time seen."""
    problem: str | None = None
    """Why the source cannot be read at the moment, if so."""


class RefusedRankStatus(Model):
    """A rank whose registration was refused."""

    attempt: str
    """Its job attempt."""
    rank: int
    """Its rank."""
    reason: str
    """What differs between it and the daemon."""


class TopologyStatus(Model):
    """The training ranks that have said hello."""

    generation: int = 0
    """Counts the changes of the live ranks."""
    attempt: str | None = None
    """The job attempt of the live ranks."""
    nodes: int = 0
    """Nodes of the training job."""
    local_ranks: int = 0
    """Ranks in each node."""
    ready: bool = False
    """Whether every rank is there and plans can be pushed."""
    missing_ranks: tuple[int, ...] = ()
    """Ranks of the newest attempt that are not here; when none is here, all of the last attempt that was complete."""
    refused_ranks: tuple[RefusedRankStatus, ...] = ()
    """Ranks that the daemon refused in the last seconds, newest first."""
    cluster: str | None = None
    """Name of the cluster description that prices plans."""
    problem: str | None = None
    """Why the ranks cannot be driven, if so."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.local_ranks


class PlacementStatus(Model):
    """The placement that every rank has agreed on."""

    version: int = 0
    """Counts the applied chunks."""
    rows: RowsByTier = Field(default_factory=dict)
    """Rows in each tier."""
    digest: str = "0" * 16
    """Order-free digest of the hot rows, 16 hexadecimal digits."""


class SnapshotStatus(Model):
    """How much would be read again after a crash."""

    age_seconds: FiniteOrNone = None
    """Since the newest durable snapshot; null before the first."""
    written: int = 0
    """Snapshots written since the daemon started."""
    failures: int = 0
    """Snapshots that could not be written since the daemon started."""
    problem: str | None = None
    """Why the newest attempt failed, if it did."""


class Status(Model):
    """The daemon on one screen."""

    job: str
    """Name of the training job."""
    version: str
    """Version of flexd."""
    uptime_seconds: float = 0.0
    """Since the daemon started."""
    healthy: bool = True
    """Whether the daemon's loop ticks."""
    ready: bool = False
    """Whether it is useful now."""
    reasons: tuple[str, ...] = ()
    """Why it is not healthy or not ready."""
    paused: bool = False
    """Whether planning and pushing are held."""
    pause_reason: str | None = None
    """What the pause was asked for."""
    stream: StreamStatus
    """The access stream."""
    sketch: SketchStatus = SketchStatus()
    """What is remembered of it."""
    drift: DriftStatus = DriftStatus()
    """How far it has moved since the live plan was made."""
    topology: TopologyStatus = TopologyStatus()
    """The training ranks."""
    placement: PlacementStatus = PlacementStatus()
    """Where the rows are now."""
    last_plan: PlanReport | None = None
    """The newest plan that was made."""
    migration: MigrationReport | None = None
    """The migration in flight, or the newest one."""
    planning: PlanningStatus = PlanningStatus()
    """When the daemon plans by itself, and what holds it back."""
    throttle: ThrottleStatus = ThrottleStatus()
    """How fast rows may migrate."""
    snapshot: SnapshotStatus = SnapshotStatus()
    """Durable state."""
    scale_out: ScaleOutStatus | None = None
    """Leader and followers; null for a daemon that is alone."""
    config: ConfigStatus = ConfigStatus()
    """The file it runs on."""
    high_availability: AvailabilityStatus | None = None
    """Who leads; null for a daemon without a lease."""
