"""What the admin API answers: typed, units in the names. The daemon fills them, the command line prints them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from flexd.server.plan_report import Measured, Model, PlanReport, RowsByTier

MAX_REASON_CHARACTERS = 500
Share = Annotated[float, Field(ge=0, le=1)]
MigrationState = Literal["PENDING", "PUSHING", "APPLYING", "COMMITTED", "SUPERSEDED", "CANCELLED", "FAILED"]
SketchKind = Literal["dense", "logarithmic", "count_min"]


class StreamStatus(Model):
    """The access stream as it is read now."""

    source: str
    """Kind of the source: ``file_log``, ``kafka``, ``synthetic`` or ``tap``."""
    lag_messages: int = 0
    """Messages in the stream that are not read yet."""
    messages_per_second: Measured = None
    """Recent rate."""
    accesses_per_second: Measured = None
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
    newest_event_unix_seconds: Measured = None
    """Newest event time seen."""
    problem: str | None = None
    """Why the source cannot be read at the moment, if so."""


class TableSketchStatus(Model):
    """The counter of one table."""

    table: str
    """Name of the table."""
    kind: SketchKind
    """``dense`` counts every row exactly, ``logarithmic`` every row in a few bits, ``count_min`` is bounded."""
    bytes: int
    """Memory of the counter."""
    error_bound: Measured = None
    """Largest over-estimate of a count-min, as a share of the table's accesses; 0 for the other kinds."""
    error_probability: Measured = None
    """Probability that one row's estimate exceeds the bound; 0 for the other kinds."""
    relative_error: Measured = None
    """Relative standard error of one row's estimate by logarithmic counters; 0 for the other kinds."""
    counter_bits: int = 0
    """Of each row's logarithmic counter; 0 for the other kinds."""
    width: int = 0
    """Counters in each of a count-min's rows of counters; 0 for the other kinds."""
    hot_rows: int = 0
    """Rows that can be listed one by one."""
    sampled_accesses: int = 0
    """Accesses kept to tell where they come from."""
    affinity: Measured = None
    """How much more often than the nodes' shares give two accesses of a row come from the same node: 0 not at all, 1
    every row belongs to one node; null before a profile, or if no row was sampled twice."""
    affinity_error: Measured = None
    """Standard error of the affinity."""


class ProfileStatus(Model):
    """What the planner would read now."""

    generation: int = 0
    """Counts the profiles made; goes on over restarts."""
    samples: int = 0
    """Accesses behind it, undecayed."""
    coverage: Measured = None
    """Smallest share of a table's accesses that listed rows and bins explain, 0-1."""
    age_seconds: Measured = None
    """Since it was made."""
    window_seconds: Measured = None
    """Event time between the oldest and the newest access."""


class SketchStatus(Model):
    """What the daemon remembers of the stream."""

    bytes: int = 0
    """Memory of all counters."""
    tables: tuple[TableSketchStatus, ...] = ()
    """One entry a table, in the configured order."""
    profile: ProfileStatus = ProfileStatus()
    """The newest profile."""


class TableDriftStatus(Model):
    """Drift of one table."""

    table: str
    """Name of the table."""
    ratio: Measured = None
    """Exposed seconds of its bytes, now / at planning; null if it caused none then."""
    exposed_seconds: float = 0.0
    """Per step, now; without the collectives' latencies."""
    inter_node_bytes: float = 0.0
    """Per rank and step, now."""


class DriftStatus(Model):
    """What the live placement costs now against what it cost when it was planned."""

    ratio: Measured = None
    """Exposed seconds of a step, now / at planning: above 1 the placement has got worse; null before the first look."""
    threshold: Measured = None
    """Above it a new plan is made; null if drift makes none."""
    exposed_seconds_then: Measured = None
    """Per step, under the profile of the plan."""
    exposed_seconds: Measured = None
    """Per step, now."""
    inter_node_bytes_then: Measured = None
    """Per rank and step, under the profile of the plan."""
    inter_node_bytes: Measured = None
    """Per rank and step, now."""
    total_bytes_then: Measured = None
    """Over all links."""
    total_bytes: Measured = None
    """Over all links, now."""
    age_seconds: Measured = None
    """Since the newest look."""
    tables: tuple[TableDriftStatus, ...] = ()
    """One entry a table, in the configured order."""


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
    """Ranks of the attempt that have not said hello."""
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


class MigrationReport(Model):
    """A migration in flight, or the newest one."""

    migration_id: str
    """Id of the migration."""
    plan_id: str
    """The plan it carries out."""
    state: MigrationState
    """Where it stands."""
    progress: Share = 0.0
    """Share of its chunks that every rank has applied."""
    rows: int = 0
    """Rows it moves."""
    rows_applied: int = 0
    """Of which on every rank."""
    chunks: int = 0
    """Chunks it is pushed in."""
    chunks_pushed: int = 0
    """Of which pushed."""
    chunks_applied: int = 0
    """Of which applied by every rank."""
    bytes: int = 0
    """Row values and optimizer state it copies, over all ranks."""
    started_unix_seconds: Measured = None
    """When it was started."""
    problem: str | None = None
    """Why it failed or is held up."""


class SnapshotStatus(Model):
    """How much would be read again after a crash."""

    age_seconds: Measured = None
    """Since the newest durable snapshot; null before the first."""
    written: int = 0
    """Snapshots written since the daemon started."""
    failures: int = 0
    """Snapshots that could not be written since the daemon started."""
    problem: str | None = None
    """Why the newest attempt failed, if it did."""


class FollowerStatus(Model):
    """One follower, as its leader knows it."""

    name: str
    """Of the follower."""
    partitions: tuple[str, ...] = ()
    """That it reads."""
    lag_messages: int = 0
    """That it has not read in them, as of its last push."""
    last_push_seconds: Measured = None
    """Since its last push."""
    silent: bool = False
    """Whether that is longer than ``scale_out.silent_after_seconds``."""
    accepted: int = 0
    """Deltas counted since the leader started."""
    repeated: int = 0
    """Deltas that were counted already (an answer was lost)."""
    refused: dict[str, int] = Field(default_factory=dict)
    """Deltas refused, by reason."""
    bytes: int = 0
    """Of all its deltas."""
    accesses: int = 0
    """Of its deltas that were counted."""


class LeaderLinkStatus(Model):
    """A follower's way to its leader."""

    leader: str
    """Address."""
    accepted: int = 0
    """Deltas that the leader counted."""
    repeated: int = 0
    """Deltas that it had counted already."""
    restarts: int = 0
    """Times that counts were dropped and the stream read again from the leader's positions."""
    dropped_messages: int = 0
    """Messages read again because of that."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Attempts that brought no final answer, by reason."""
    bytes: int = 0
    """Sent."""
    last_answer_seconds: Measured = None
    """Since the newest answer."""
    partitions: tuple[str, ...] = ()
    """Read here."""
    paused: bool = False
    """Nothing is read until the leader answers."""
    problem: str | None = None
    """What is wrong with the way to the leader."""


class ScaleOutStatus(Model):
    """Several daemons on one stream."""

    role: Literal["leader", "follower"]
    """Of this daemon."""
    followers: tuple[FollowerStatus, ...] = ()
    """Leader: by name; the leader's own reader is among them."""
    refused: dict[str, int] = Field(default_factory=dict)
    """Leader: requests and deltas refused, by reason."""
    link: LeaderLinkStatus | None = None
    """Follower: its way to the leader."""


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
    snapshot: SnapshotStatus = SnapshotStatus()
    """Durable state."""
    scale_out: ScaleOutStatus | None = None
    """Leader and followers; null for a daemon that is alone."""


class ReplanRequest(BaseModel):
    """Body of ``POST /v1/replan``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = "asked for by hand"
    """Recorded with the plan."""
    wait_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0.0
    """How long to wait for the migration to end; 0 returns as soon as the plan is made."""


class PauseRequest(BaseModel):
    """Body of ``POST /v1/pause``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = "asked for by hand"
    """Shown in the status until ``resume``."""


ReplanOutcome = Literal["unchanged", "accepted", "committed", "superseded", "cancelled", "failed", "timed_out"]


class ReplanResult(Model):
    """What became of a re-plan."""

    outcome: ReplanOutcome
    """``unchanged``: nothing to move. ``accepted``: the migration runs (no wait was asked for). ``committed``: every
    rank has applied it. ``timed_out``: still running at the end of the wait; it goes on."""
    plan: PlanReport | None = None
    """The plan."""
    migration: MigrationReport | None = None
    """Its migration, if anything moves."""
    placement_version: int = 0
    """The version that every rank has agreed on."""
    message: str = ""
    """One sentence for people."""


class PauseState(Model):
    """Whether planning and pushing are held."""

    paused: bool
    """Whether they are held now."""
    reason: str | None = None
    """What the pause was asked for."""
    changed: bool = True
    """False if it was so already."""


class ProbeResult(Model):
    """Answer of ``/healthz`` and ``/readyz``."""

    ok: bool
    """HTTP status 200 if true, 503 if not."""
    reasons: tuple[str, ...] = ()
    """Why not."""


class ErrorDetail(Model):
    """What was wrong and what to do about it."""

    type: str
    """Class of the error."""
    message: str
    """What was wrong, and where."""
    remedy: str = ""
    """What the reader can do."""


class ErrorBody(Model):
    """Body of every answer with a status of 400 or above, except those of the probes."""

    error: ErrorDetail
    """The error."""
