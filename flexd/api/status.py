"""The daemon on one screen, and the daemon itself: its configuration, pause, threads, saved state and snapshots."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flexd.api.base import CommandRequest, Reason
from flexd.api.migration import MigrationCounts, ThrottleStatus
from flexd.api.plan import PlanReport
from flexd.api.planning import DriftStatus, PlacementStatus, PlanningStatus, PricesStatus
from flexd.api.rank import TopologyStatus
from flexd.api.stream import SketchStatus, StreamStatus
from flexd.api.training import IdsStatus, SlowMemoryStatus, TrainingStatus
from flexd.control.daemon.migration import MigrationRecord
from flexd.core.model import ALWAYS, HIDDEN, FiniteOrNone, Model, Show, counter, gauge, info, with_zeros

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.api.base import ProbeResult
    from flexd.config.model import Config
    from flexd.core.supervision import Supervisor
    from flexd.sketch.ingestor import Ingestor


class KeyChange(Model):
    """A key whose value in the file differs from what runs; secrets are replaced."""

    key: str
    before: Any = None
    after: Any = None
    needs_restart: bool = False
    """True if a reload does not apply it."""


class ReloadReport(Model):
    """The result of reading the configuration file again, or the preview of one."""

    file: str
    dry_run: bool = False
    """True for a preview, which changes nothing."""
    applied: tuple[str, ...] = ()
    """Key paths that differ from what ran, and are in effect now."""
    pending: tuple[str, ...] = ()
    """Key paths that differ from what runs, and need a restart."""
    changes: tuple[KeyChange, ...] = ()
    """Both, with their values."""


class ConfigStatus(Model):
    """The file that the daemon runs on."""

    file: str | None = None
    """Path of the file; null for a daemon without one."""
    read_unix_seconds: FiniteOrNone = None
    pending: tuple[str, ...] = ()
    """Key paths in which it differs from what runs, until a restart."""
    reloads: dict[str, int] = Field(default_factory=dict)
    """Reloads since the daemon started, by outcome: ``applied``, ``unchanged``, ``rejected``."""
    problem: str | None = None
    """Reason why the newest reload was rejected; null if it was not."""

    FAMILIES = (counter("flexd_config_reloads", "Reloads by outcome.", "reloads", ("outcome",)),)


class ConfigReport(Model):
    """The effective configuration."""

    version: str
    """Version of flexd: another version may know other keys."""
    config: dict[str, Any]


class PauseRequest(CommandRequest):
    """Body of ``POST /v1/pause``."""

    reason: Reason = "requested by hand"
    """Shown in the status until ``resume``; recorded."""


class PauseState(Model):
    """The state after a pause or resume."""

    paused: bool
    """True while planning and pushing are held."""
    reason: str | None = None
    changed: bool = True
    """False if the state was the same before."""
    saved: bool = True
    """False as long as it cannot be written to the state: a restart would forget it."""


class DecisionsStatus(Model):
    """The file of the operators' decisions, which outlive the daemon; counters run since it started."""

    failures: int = 0

    FAMILIES = (
        counter(
            "flexd_decisions_failures", "Writes of decisions to state.sqlite that failed, and are tried again.",
            "failures",
        ),
    )  # fmt: skip


class ThreadsStatus(Model):
    """Unexpected exceptions of the daemon's threads; counters run since the process started."""

    faults: dict[str, int] = Field(default_factory=dict)
    problems: dict[str, str] = Field(default_factory=dict)
    """The work that fails now, in words, by thread; it is attempted again after a back-off."""
    ending: str | None = None
    """Reason why the daemon is ending because it cannot go on safely; null otherwise."""

    FAMILIES = (
        counter("flexd_thread_faults", "Unexpected exceptions, by thread.", "faults", ("thread",)),
        gauge(
            "flexd_thread_failing", "1 while the work of the thread fails, which makes the daemon not ready.",
            lambda threads: {name: float(name in threads.problems) for name in threads.faults},
            ("thread",),
        ),
    )  # fmt: skip


def threads_status(supervisor: Supervisor) -> ThreadsStatus:
    """Return the state of a supervisor's threads."""
    problems: dict[str, str] = {}
    for problem in supervisor.problems():
        before = problems.get(problem.thread)
        problems[problem.thread] = f"{before}; {problem}" if before else str(problem)
    return ThreadsStatus(faults=supervisor.faults(), problems=problems, ending=supervisor.fatal or None)


MAX_TABLES = 100


class RestoredTable(Model):
    """One table of the restored snapshot that is not as it was saved."""

    table: str
    outcome: str
    """``emptied``, ``new`` or ``removed``."""
    accesses: int = 0
    detail: str = ""


class StateStatus(Model):
    """The saved state: what the newest start kept of it."""

    restored_from: str | None = None
    """The snapshot that this start continued from; null if there was none."""
    outcomes: dict[str, int] = Field(default_factory=dict)
    tables: tuple[RestoredTable, ...] = ()
    """The tables that are not as they were saved; at most 100."""
    lost_accesses: int = 0
    problems: tuple[str, ...] = ()
    """Why snapshots were not used by this start."""

    FAMILIES = (
        gauge(
            "flexd_state_tables", "Tables of the snapshot that this start continued from, by outcome.",
            lambda state: with_zeros(_outcomes(), state.outcomes), ("outcome",),
        ),
        gauge(
            "flexd_state_lost_accesses", "Counted accesses of the tables that this start emptied or removed.",
            "lost_accesses",
        ),
    )  # fmt: skip


def _outcomes() -> tuple[str, ...]:
    from flexd.sketch.restore import OUTCOMES

    return tuple(OUTCOMES)


def state_status(ingestor: Ingestor) -> StateStatus:
    """Return what the ingest restored."""
    restored = ingestor.restored
    # Those that lost counts first: the list is bounded.
    changed = sorted((each for each in restored.outcomes if each.outcome != "kept"), key=lambda each: -each.lost)
    return StateStatus(
        restored_from=None if restored.path is None else restored.path.name,
        outcomes=dict(Counter(outcome.outcome for outcome in restored.outcomes)),
        tables=tuple(RestoredTable.from_object(outcome) for outcome in changed[:MAX_TABLES]),
        lost_accesses=sum(outcome.lost for outcome in restored.outcomes),
        problems=tuple(restored.problems),
    )


class SnapshotStatus(Model):
    """The newest durable snapshot: what came after it is read again after a crash."""

    age_seconds: FiniteOrNone = None
    written: int = 0
    failures: int = 0
    bytes: int = 0
    pause_seconds: FiniteOrNone = None
    """Time in which counting stood still for the newest snapshot."""
    problem: str | None = None
    """Reason why the newest attempt failed; null if it did not."""

    FAMILIES = (
        gauge("flexd_snapshot_age_seconds", "Since the newest durable snapshot.", "age_seconds"),
        gauge("flexd_snapshot_bytes", "Size of the newest snapshot.", "bytes"),
        counter("flexd_snapshots", "Snapshots written.", "written"),
        counter("flexd_snapshot_failures", "Snapshots that could not be written.", "failures"),
    )


def snapshot_status(ingestor: Ingestor) -> SnapshotStatus:
    """Return the state of the snapshots in the rotation."""
    cycle = ingestor.snapshots
    return SnapshotStatus(
        age_seconds=time.monotonic() - cycle.saved_at,
        written=cycle.saved,
        failures=ingestor.failures["snapshots"],
        bytes=cycle.bytes or ingestor.restored.bytes,
        pause_seconds=cycle.pause_seconds,
        problem="; ".join(text for part, text in ingestor.problems() if part == "snapshots") or None,
    )


DAEMON = "flexd"
"""The one that pauses if no user does."""


class DaemonStatus(Model):
    """The daemon on one screen."""

    job: str
    version: str
    started_unix_seconds: Annotated[float, HIDDEN] = 0.0
    age_seconds: Annotated[float, HIDDEN] = 0.0
    """Since it was made: the daemon keeps it, and makes it anew at every tick and after every command."""
    uptime_seconds: float = 0.0
    healthy: bool = True
    ready: Annotated[bool, ALWAYS] = False
    reasons: tuple[str, ...] = ()
    """Reasons why it is not healthy or not ready."""
    paused: bool = False
    pause_reason: str | None = None
    paused_by: str | None = None
    """The one that paused; ``flexd`` if ranks repeatedly reported another placement than the daemon had recorded."""
    stream: StreamStatus
    sketch: SketchStatus = SketchStatus()
    drift: DriftStatus = DriftStatus()
    topology: TopologyStatus = TopologyStatus()
    placement: PlacementStatus = PlacementStatus()
    training: TrainingStatus = TrainingStatus()
    slow_memory: SlowMemoryStatus | None = None
    """Rows in tiered storage; null if all are in fast memory."""
    unbounded_ids: IdsStatus | None = None
    """Null if no table has any."""
    prices: PricesStatus = PricesStatus()
    last_plan: Annotated[PlanReport | None, Show(brief=True)] = None
    """The newest plan that was made."""
    migration: Annotated[MigrationRecord | None, Show(brief=True)] = None
    """The migration in flight, or the newest one."""
    migrations: Annotated[MigrationCounts, Show(brief=True)] = MigrationCounts()
    planning: PlanningStatus = PlanningStatus()
    throttle: Annotated[ThrottleStatus, Show(brief=True)] = ThrottleStatus()
    decisions: Annotated[DecisionsStatus, HIDDEN] = DecisionsStatus()
    snapshot: Annotated[SnapshotStatus, Show(brief=True)] = SnapshotStatus()
    state: StateStatus = StateStatus()
    config: ConfigStatus = ConfigStatus()
    threads: ThreadsStatus = ThreadsStatus()

    FAMILIES = (
        info(
            "flexd_build", "The running flexd.",
            lambda status: {"version": status.version, "training_job": status.job},
        ),
        gauge("flexd_start_time_seconds", "Start of the daemon, Unix time.", "started_unix_seconds"),
        gauge("flexd_healthy", "1 while the daemon's loop ticks.", "healthy"),
        gauge("flexd_ready", "1 while the daemon is useful (as /readyz).", "ready"),
        gauge("flexd_paused", "1 while planning and pushing are held.", "paused"),
        gauge(
            "flexd_paused_by_daemon", "1 while they are held because ranks repeatedly reported another placement.",
            lambda status: status.paused and status.paused_by == DAEMON,
        ),
    )  # fmt: skip

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the whole daemon but those of single ranks; NaN before a plan or migration."""
        plan = self.last_plan or PlanReport(plan_id="")
        migration = self.migration or MigrationRecord(migration_id="")
        return Model.metrics(self.model_copy(update={"last_plan": plan, "migration": migration}))


def base_status(
    config: Config, started_unix_seconds: float, uptime_seconds: float, health: ProbeResult, not_ready: Sequence[str]
) -> DaemonStatus:
    """Return what a daemon knows without tables: the job, the process, and why it is not healthy or ready."""
    from flexd import __version__

    return DaemonStatus(
        job=config.job,
        version=__version__,
        started_unix_seconds=started_unix_seconds,
        uptime_seconds=uptime_seconds,
        healthy=health.ok,
        ready=not not_ready,
        reasons=(*health.reasons, *not_ready),
        stream=StreamStatus(source=config.stream.source.kind),
    )
