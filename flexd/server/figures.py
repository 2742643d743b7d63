"""One frozen snapshot of the daemon's figures, read on every scrape of the metrics page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexd.operations.training_monitor import RankAverages, TrainingTotals

TIER_NAMES = ("home", "node", "device")


@dataclass(frozen=True)
class IngestFigures:
    """Counters since the daemon started, and gauges of the stream as it is now.

    Attributes:
        messages, accesses, bytes: read and counted.
        rejected_messages, rejected_accesses: by reason; the reasons are a bounded set (``CodecError.reason``, ...).
        adjusted_accesses: counted, but at another time than they were dated, by rule (``future_clamped``, ``late``).
        lag_messages: not read yet.
        dead_letters: samples of rejected messages written.
        connected: False while the source reports a problem.
        newest_event_unix_seconds: newest event time, NaN before the first.
        messages_lost: that the source could not deliver.
        dead_letter_failures, source_failures, commit_failures: failed attempts of each.
    """

    messages: int = 0
    accesses: int = 0
    bytes: int = 0
    rejected_messages: Mapping[str, int] = field(default_factory=dict)
    rejected_accesses: Mapping[str, int] = field(default_factory=dict)
    adjusted_accesses: Mapping[str, int] = field(default_factory=dict)
    lag_messages: int = 0
    dead_letters: int = 0
    connected: bool = True
    newest_event_unix_seconds: float = float("nan")
    messages_lost: int = 0
    dead_letter_failures: int = 0
    source_failures: int = 0
    commit_failures: int = 0


@dataclass(frozen=True)
class SketchFigures:
    """Memory and quality of what is remembered.

    Attributes:
        bytes_by_table: memory of each table's counter; the keys are the configured tables.
        error_bound_by_table: largest over-estimate of a count-min as a share of the table's accesses, 0 for others.
        width_by_table: counters in each of a count-min's rows of counters, 0 for others.
        relative_error_by_table: relative standard error of a row's logarithmic counter, 0 for other kinds.
        counter_bits_by_table: of a row's logarithmic counter, 0 for other kinds.
        affinity_by_table, affinity_error_by_table: of the newest profile; NaN where unknown.
        profile_age_seconds: since the newest profile, NaN before the first.
        profile_coverage: 0-1, NaN before the first.
        profile_samples: accesses behind the newest profile.
        profile_generation: profiles made.
    """

    bytes_by_table: Mapping[str, int] = field(default_factory=dict)
    error_bound_by_table: Mapping[str, float] = field(default_factory=dict)
    profile_age_seconds: float = float("nan")
    profile_coverage: float = float("nan")
    profile_samples: int = 0
    profile_generation: int = 0
    width_by_table: Mapping[str, int] = field(default_factory=dict)
    affinity_by_table: Mapping[str, float] = field(default_factory=dict)
    affinity_error_by_table: Mapping[str, float] = field(default_factory=dict)
    relative_error_by_table: Mapping[str, float] = field(default_factory=dict)
    counter_bits_by_table: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DriftFigures:
    """The live placement under the present profile and under that of its plan.

    Attributes:
        ratio: exposed seconds of a step, now / then; NaN before the first look.
        exposed_seconds, inter_node_bytes, total_bytes: (then, now) per rank and step.
        ratio_by_table, exposed_seconds_by_table, inter_node_bytes_by_table: of each table, the latter two now.
        age_seconds: since the newest look.
        evaluations, seconds: looks since the daemon started, and their wall time.
    """

    ratio: float = float("nan")
    exposed_seconds: tuple[float, float] = (float("nan"), float("nan"))
    inter_node_bytes: tuple[float, float] = (float("nan"), float("nan"))
    total_bytes: tuple[float, float] = (float("nan"), float("nan"))
    ratio_by_table: Mapping[str, float] = field(default_factory=dict)
    exposed_seconds_by_table: Mapping[str, float] = field(default_factory=dict)
    inter_node_bytes_by_table: Mapping[str, float] = field(default_factory=dict)
    age_seconds: float = float("nan")
    evaluations: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class PlanFigures:
    """Planning since the daemon started.

    Attributes:
        plans: by outcome (``changed``, ``unchanged``, ``refused``).
        seconds: wall time of all planning, summed.
        predicted_before_seconds, predicted_after_seconds: communication of one step as the newest plan prices it.
        age_seconds: since the newest plan, NaN before the first.
    """

    plans: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    predicted_before_seconds: float = float("nan")
    predicted_after_seconds: float = float("nan")
    age_seconds: float = float("nan")


@dataclass(frozen=True)
class PlanningFigures:
    """What makes the daemon plan, and what holds it back.

    Attributes:
        auto, window_open: whether plans are carried out, as far as mode and maintenance windows go.
        triggers: plans asked for since the daemon started, by what asked.
        gates: by name: (open, measured, required), of the newest profile.
        overridden: plans carried out with a closed gate, by gate.
        proposals: kept plans.
    """

    auto: bool = True
    window_open: bool = True
    triggers: Mapping[str, int] = field(default_factory=dict)
    gates: Mapping[str, tuple[bool, float, float]] = field(default_factory=dict)
    overridden: Mapping[str, int] = field(default_factory=dict)
    proposals: int = 0


@dataclass(frozen=True)
class ThrottleFigures:
    """What holds migrations back. Bytes are of row values and optimizer state copied.

    Attributes:
        bytes_per_step, bytes_per_second: in effect; NaN without a limit.
        adaptive, paused: whether step times slow migrations down, and hold a chunk back now.
        released_bytes, released_chunks: let go since the daemon started.
        waiting_seconds: in which a chunk was held, by what it waited for.
        decisions: of the adaptive controller, by kind (``slowed``, ``sped``, ``paused``).
        step_seconds: (``without_migration`` or ``migrating``, ``p50`` or ``p90``) -> seconds; NaN if not known.
    """

    bytes_per_step: float = float("nan")
    bytes_per_second: float = float("nan")
    adaptive: bool = False
    paused: bool = False
    released_bytes: int = 0
    released_chunks: int = 0
    waiting_seconds: Mapping[str, float] = field(default_factory=dict)
    decisions: Mapping[str, int] = field(default_factory=dict)
    step_seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class HistoryFigures:
    """The history of migrations since the daemon started.

    Attributes:
        entries: written. lost: dropped unwritten. failures: failed writes, tried again. quarantined: unusable files.
    """

    entries: int = 0
    lost: int = 0
    failures: int = 0
    quarantined: int = 0


@dataclass(frozen=True)
class DecisionFigures:
    """What people have decided, since the daemon started.

    Attributes:
        failures: writes that failed, tried again. quarantined: unusable files.
    """

    failures: int = 0
    quarantined: int = 0


@dataclass(frozen=True)
class MigrationFigures:
    """Migrations since the daemon started.

    Attributes:
        migrations: ended ones, by final state (``committed``, ``superseded``, ``aborted``, ``failed``).
        rows, bytes, chunks: applied by every rank.
        progress: 0-1 of the one in flight, NaN if none is. eta_seconds: of the same, NaN if not known.
        illegal_transitions: refused by the state table: a fault of flexd.
    """

    migrations: Mapping[str, int] = field(default_factory=dict)
    rows: int = 0
    bytes: int = 0
    chunks: int = 0
    progress: float = float("nan")
    eta_seconds: float = float("nan")
    illegal_transitions: int = 0
    history: HistoryFigures = HistoryFigures()


@dataclass(frozen=True)
class PlacementFigures:
    """Where the rows are.

    Attributes:
        version: of the placement that every rank has agreed on.
        version_by_rank: as each rank reported it last.
        rows_by_tier: rows in (HOME, NODE, DEVICE).
        digest_mismatches: reports whose placement digest was not the daemon's for that version.
    """

    version: int = 0
    version_by_rank: Mapping[int, int] = field(default_factory=dict)
    rows_by_tier: tuple[int, int, int] = (0, 0, 0)
    digest_mismatches: int = 0


@dataclass(frozen=True)
class ControlFigures:
    """The control channel since the daemon started.

    Attributes:
        epochs: epochs begun.
        topology_generation: of the live ranks.
        ranks, ranks_ready: expected and present.
        refused_messages: by kind (a bounded set: ``stale``, ``forged``, ``malformed``, ...).
        refused_chunks: chunks that a rank refused whole.
    """

    epochs: int = 0
    topology_generation: int = 0
    ranks: int = 0
    ranks_ready: int = 0
    refused_messages: Mapping[str, int] = field(default_factory=dict)
    refused_chunks: int = 0


@dataclass(frozen=True)
class SnapshotFigures:
    """Durable state.

    Attributes:
        age_seconds: since the newest snapshot, NaN before the first.
        written, failures: since the daemon started.
        bytes: size of the newest. pause_seconds: how long counting stood still for it.
    """

    age_seconds: float = float("nan")
    written: int = 0
    failures: int = 0
    bytes: int = 0
    pause_seconds: float = 0.0


@dataclass(frozen=True)
class FollowerFigures:
    """One follower at its leader.

    Attributes:
        last_push_seconds: since its last push. lag_messages: not read in its partitions. partitions: how many.
        accepted, repeated, bytes, accesses: of its deltas.
    """

    last_push_seconds: float
    silent: bool
    partitions: int
    lag_messages: int
    accepted: int
    repeated: int
    bytes: int
    accesses: int


@dataclass(frozen=True)
class ScaleOutFigures:
    """Leader and followers; empty for a daemon that is alone.

    Attributes:
        followers: by name (leader). refused: requests and deltas, by reason (leader).
        pushed: deltas by outcome (follower). failures: attempts without a final answer, by reason (follower).
        restarts: times that counts were dropped and read again (follower). dropped_messages: read again for that.
        sent_bytes, last_answer_seconds: of the follower's link; NaN before the first answer.
    """

    followers: Mapping[str, FollowerFigures] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    pushed: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    restarts: int = 0
    dropped_messages: int = 0
    sent_bytes: int = 0
    last_answer_seconds: float = float("nan")


@dataclass(frozen=True)
class ConfigFigures:
    """Reloads since the start, by outcome (applied, unchanged, rejected), and keys that wait for a restart."""

    reloads: Mapping[str, int] = field(default_factory=dict)
    pending_keys: int = 0


@dataclass(frozen=True)
class AvailabilityFigures:
    """A daemon that shares a lease with others.

    Attributes:
        term: of the lease it holds; 0 if it holds none.
        leadership_acquisitions, leadership_losses: times it began to lead, and lost the lease while it led.
        lease_failures: attempts that could not reach the lease.
    """

    leading: bool
    term: int
    leadership_acquisitions: int
    leadership_losses: int
    lease_failures: int


@dataclass(frozen=True)
class DaemonFigures:
    """All of it at one moment.

    Attributes:
        job, version: constant labels of the build info.
        started_unix_seconds: start of the daemon.
        healthy, ready, paused: as in the status.
        pauses: pauses since the daemon started.
    """

    job: str
    version: str
    started_unix_seconds: float
    healthy: bool = True
    ready: bool = False
    paused: bool = False
    pauses: int = 0
    ingest: IngestFigures = IngestFigures()
    sketch: SketchFigures = SketchFigures()
    drift: DriftFigures = DriftFigures()
    plan: PlanFigures = PlanFigures()
    planning: PlanningFigures = PlanningFigures()
    throttle: ThrottleFigures = ThrottleFigures()
    migration: MigrationFigures = MigrationFigures()
    decisions: DecisionFigures = DecisionFigures()
    placement: PlacementFigures = PlacementFigures()
    training: TrainingTotals = field(default_factory=TrainingTotals)
    ranks: Mapping[int, RankAverages] = field(default_factory=dict)
    control: ControlFigures = ControlFigures()
    snapshot: SnapshotFigures = SnapshotFigures()
    scale_out: ScaleOutFigures | None = None
    availability: AvailabilityFigures | None = None
    config: ConfigFigures = ConfigFigures()
