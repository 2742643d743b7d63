"""A daemon made of plain attributes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from flexd.api.base import ProbeResult
from flexd.api.daemon import KeyChange, PauseState, ReloadReport
from flexd.api.execution import ReplanResult
from flexd.api.explanation import Explanation, RowReport, ThresholdReport
from flexd.api.plan import PlanReport, ReplicationReport
from flexd.api.status import Status
from flexd.api.stream import StreamStatus
from flexd.control.daemon.migration_record import MigrationRecord
from tests.support.fake_inspection import FakeInspection
from tests.support.fake_migrations import FakeMigrations
from tests.support.fake_planning import FakePlanning

OK = ProbeResult(ok=True)
RELOADED = ReloadReport(
    file="flexd.yaml", applied=("log.level",), pending=("tables",),
    changes=(
        KeyChange(key="log.level", before="info", after="debug"),
        KeyChange(
            key="tables", before=[{"name": "items", "rows": 100}],
            after=[{"name": "items", "rows": 200}, {"name": "users", "rows": 50}], needs_restart=True,
        ),
    ),
)  # fmt: skip
STATUS = Status(job="job", version="1.2.3", started_unix_seconds=1.0, stream=StreamStatus(source="file_log"))


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
    shown: Status = STATUS
    kept: FakePlanning | None = None

    @property
    def inspect(self) -> FakeInspection:
        return FakeInspection(self._enter)

    def handler(self, name: str) -> Callable[..., Any]:
        """Return its own method, or that of the part which the route names."""
        own = getattr(self, name.rpartition(".")[2], None)
        return own if callable(own) else attrgetter(name)(self)

    def _enter(self, *call: object) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    @property
    def planning(self) -> FakePlanning:
        if self.kept is None:
            self.kept = FakePlanning(self._enter, lambda: self.outcome)
        return self.kept

    @property
    def operator(self) -> FakePlanning:
        """The throttle."""
        return self.planning

    @property
    def migrations(self) -> FakeMigrations:
        return FakeMigrations(self._enter, lambda: self.outcome)

    def status(self) -> Status:
        self._enter("status")
        return self.shown.model_copy(update={"paused": self.paused})

    def plan(self) -> PlanReport:
        self._enter("plan")
        return PlanReport(plan_id="p2", replication=ReplicationReport(messages=("because",)))

    def explain(self, table: str, row: int | None, hottest: int) -> Explanation:
        self._enter("explain", table, row, hottest)
        seconds = {"HOME": 2e-9, "NODE": 1e-9}
        rows = (RowReport(row=7 if row is None else row, accesses_per_step=3.0, seconds=seconds, planned="NODE"),)
        node = ThresholdReport(tier="NODE", slots=1, slot_seconds=1e-10, promote_accesses=2.0, demote_accesses=1.5)
        return Explanation(table=table, rows=100, thresholds=(node,), explained=rows if hottest or row else ())

    def replan(self, reason: str, wait_seconds: float, *, force: bool = False, requested_by: str = "") -> ReplanResult:
        self._enter("replan", reason, wait_seconds, *((requested_by,) if force else ()))
        if self.hold is not None:
            self.hold.wait(20)
        migration = MigrationRecord(migration_id="m1", plan_id="p2", state="committed")
        return ReplanResult(outcome=self.outcome, plan=PlanReport(plan_id="p2"), migration=migration)

    def pause(self, reason: str, requested_by: str = "") -> PauseState:
        self._enter("pause", reason, requested_by)
        changed, self.paused = not self.paused, True
        return PauseState(paused=True, reason=reason, changed=changed)

    def resume(self, reason: str = "", requested_by: str = "") -> PauseState:
        self._enter("resume", reason, requested_by)
        changed, self.paused = self.paused, False
        return PauseState(paused=False, changed=changed)

    def reload(self, reason: str = "", requested_by: str = "") -> ReloadReport:
        self._enter("reload", reason, requested_by)
        return RELOADED

    def preview_reload(self) -> ReloadReport:
        self._enter("preview_reload")
        return RELOADED.model_copy(update={"dry_run": True})

    def health(self) -> ProbeResult:
        if self.error is not None:
            raise self.error
        return self.healthy

    def ready(self) -> ProbeResult:
        return self.useful
