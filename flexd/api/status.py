"""The daemon on one screen: the response of ``GET /v1/status``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from flexd.api.daemon import ConfigStatus, DecisionsStatus, SnapshotStatus, StateStatus, ThreadsStatus
from flexd.api.migration import MigrationCounts, ThrottleStatus
from flexd.api.placement import DriftStatus, PlacementStatus, PricesStatus
from flexd.api.plan import PlanReport
from flexd.api.planning import PlanningStatus
from flexd.api.rank import TopologyStatus
from flexd.api.stream import StreamStatus
from flexd.api.table import SketchStatus
from flexd.api.training import SlowMemoryStatus, TrainingStatus
from flexd.control.daemon.migration_record import MigrationRecord
from flexd.core.model import ALWAYS, HIDDEN, Model, Show, gauge, info

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.api.base import ProbeResult
    from flexd.config.model import Config
    from flexd.core.fast_start import ProcessStart


DAEMON = "flexd"
"""The one that pauses if no user does."""


class DaemonStatus(Model):
    """The daemon on one screen."""

    job: str
    """Name of the training job."""
    version: str
    """Version of flexd."""
    started_unix_seconds: Annotated[float, HIDDEN] = 0.0
    """When the daemon started."""
    uptime_seconds: float = 0.0
    """Since the daemon started."""
    healthy: bool = True
    """True while the daemon's loop ticks."""
    ready: Annotated[bool, ALWAYS] = False
    """True while the daemon is useful."""
    reasons: tuple[str, ...] = ()
    """Reasons why it is not healthy or not ready."""
    paused: bool = False
    """True while planning and pushing are held."""
    pause_reason: str | None = None
    """Reason given for the pause."""
    paused_by: str | None = None
    """The one that paused; ``flexd`` if ranks repeatedly reported another placement than the daemon had recorded."""
    stream: StreamStatus
    """The access stream."""
    sketch: SketchStatus = SketchStatus()
    """The counters of it."""
    drift: DriftStatus = DriftStatus()
    """Its change since the live plan was made."""
    topology: TopologyStatus = TopologyStatus()
    """The training ranks."""
    placement: PlacementStatus = PlacementStatus()
    """The placement of rows."""
    training: TrainingStatus = TrainingStatus()
    """The steps of all ranks."""
    slow_memory: SlowMemoryStatus | None = None
    """Rows in tiered storage; null if all are in fast memory."""
    prices: PricesStatus = PricesStatus()
    """What steps have shown of the curves that price plans."""
    last_plan: Annotated[PlanReport | None, Show(brief=True)] = None
    """The newest plan that was made."""
    migration: Annotated[MigrationRecord | None, Show(brief=True)] = None
    """The migration in flight, or the newest one."""
    migrations: Annotated[MigrationCounts, Show(brief=True)] = MigrationCounts()
    """All migrations since the daemon started."""
    planning: PlanningStatus = PlanningStatus()
    """When the daemon plans by itself, and what holds it back."""
    throttle: Annotated[ThrottleStatus, Show(brief=True)] = ThrottleStatus()
    """The limits on migrations."""
    decisions: Annotated[DecisionsStatus, HIDDEN] = DecisionsStatus()
    """The file of the operators' decisions."""
    snapshot: Annotated[SnapshotStatus, Show(brief=True)] = SnapshotStatus()
    """Durable state."""
    state: StateStatus = StateStatus()
    """The saved state as this start found and left it."""
    config: ConfigStatus = ConfigStatus()
    """The file it runs on."""
    threads: ThreadsStatus = ThreadsStatus()
    """The daemon's threads."""

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


def base_status(config: Config, started: ProcessStart, health: ProbeResult, ready: ProbeResult) -> DaemonStatus:
    """Return what a daemon of any role knows: the job, the process and its probes."""
    from flexd import __version__

    return DaemonStatus(
        job=config.job,
        version=__version__,
        started_unix_seconds=started.unix_seconds,
        uptime_seconds=started.uptime_seconds,
        healthy=health.ok,
        ready=ready.ok,
        reasons=(*health.reasons, *ready.reasons),
        stream=StreamStatus(source=config.stream.source.kind),
    )
