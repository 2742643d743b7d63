"""A daemon made of plain attributes, and its listeners on free ports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from flexd.config import ServerConfig
from flexd.server.figures import DaemonFigures
from flexd.server.http import DaemonServer
from flexd.server.metrics import Metrics
from flexd.server.models import (
    MigrationReport,
    PauseState,
    ProbeResult,
    ReplanResult,
    Status,
    StreamStatus,
)
from flexd.server.plan_report import PlanReport, ReplicationReport

OK = ProbeResult(ok=True)
FIGURES = DaemonFigures(job="job", version="1.2.3", started_unix_seconds=1.0)


@dataclass
class FakeDaemon:
    """Set ``error`` to make every verb raise it; ``hold`` keeps ``replan`` waiting until it is set."""

    error: Exception | None = None
    healthy: ProbeResult = OK
    useful: ProbeResult = OK
    outcome: str = "committed"
    paused: bool = False
    calls: list[tuple[object, ...]] = field(default_factory=list)
    hold: threading.Event | None = None
    figures: DaemonFigures = FIGURES

    def _enter(self, *call: object) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def status(self) -> Status:
        self._enter("status")
        return Status(job="job", version="1.2.3", stream=StreamStatus(source="file_log"), paused=self.paused)

    def plan(self) -> PlanReport:
        self._enter("plan")
        return PlanReport(plan_id="p2", replication=ReplicationReport(words=("because",)))

    def replan(self, reason: str, wait_seconds: float) -> ReplanResult:
        self._enter("replan", reason, wait_seconds)
        if self.hold is not None:
            self.hold.wait(20)
        migration = MigrationReport(migration_id="m1", plan_id="p2", state="COMMITTED", progress=1.0)
        return ReplanResult(outcome=self.outcome, plan=PlanReport(plan_id="p2"), migration=migration)

    def pause(self, reason: str) -> PauseState:
        self._enter("pause", reason)
        changed, self.paused = not self.paused, True
        return PauseState(paused=True, reason=reason, changed=changed)

    def resume(self) -> PauseState:
        self._enter("resume")
        changed, self.paused = self.paused, False
        return PauseState(paused=False, changed=changed)

    def health(self) -> ProbeResult:
        if self.error is not None:
            raise self.error
        return self.healthy

    def ready(self) -> ProbeResult:
        return self.useful


@pytest.fixture(scope="session")
def _daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture(scope="session")
def _server(_daemon: FakeDaemon) -> Iterator[DaemonServer]:
    config = ServerConfig(port=0, metrics_listen="127.0.0.1:0")
    served = DaemonServer(_daemon, Metrics(lambda: _daemon.figures), config)
    served.start()
    yield served
    assert served.stop(10)


@pytest.fixture
def daemon(_daemon: FakeDaemon) -> Iterator[FakeDaemon]:
    """Fresh for each test, behind one server (starting one takes a good part of a second)."""
    _daemon.__init__()
    yield _daemon
    if _daemon.hold is not None:
        _daemon.hold.set()


@pytest.fixture
def server(_server: DaemonServer, daemon: FakeDaemon) -> DaemonServer:
    """Admin API and metrics-only listener on free loopback ports."""
    return _server
