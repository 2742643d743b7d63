"""Implementations of ``DaemonApi`` for a process whose daemon may not be active."""

from __future__ import annotations

from typing import Protocol

from flexd.api.config import ReloadReport
from flexd.api.errors import ProbeResult
from flexd.api.explanation import Explanation
from flexd.api.interface import AttemptsApi, DaemonApi, InspectApi, MigrationsApi, PlanningApi
from flexd.api.pause import PauseState
from flexd.api.plan import PlanReport
from flexd.api.replan import ReplanResult
from flexd.api.status import Status
from flexd.core.errors import ApiError


class InactiveDaemon(Protocol):
    """Refuses every command. A subclass adds the status and the probes."""

    def refusal(self) -> ApiError:
        """Return the error of every command."""
        ...

    @property
    def inspect(self) -> InspectApi:
        raise self.refusal()

    @property
    def planning(self) -> PlanningApi:
        raise self.refusal()

    @property
    def migrations(self) -> MigrationsApi:
        raise self.refusal()

    @property
    def attempts(self) -> AttemptsApi:
        raise self.refusal()

    def plan(self) -> PlanReport:
        raise self.refusal()

    def explain(self, table: str, row: int | None, hottest: int) -> Explanation:
        raise self.refusal()

    def replan(self, reason: str, wait_seconds: float, *, force: bool = False, who: str = "") -> ReplanResult:
        raise self.refusal()

    def pause(self, reason: str, who: str = "") -> PauseState:
        raise self.refusal()

    def resume(self, reason: str = "", who: str = "") -> PauseState:
        raise self.refusal()

    def reload(self, reason: str = "", who: str = "") -> ReloadReport:
        raise self.refusal()

    def preview_reload(self) -> ReloadReport:
        raise self.refusal()


class ActiveDaemon(Protocol):
    """Forwards every command to the daemon that is active when the command arrives.

    A subclass may override what the process itself answers in every role.
    """

    def active(self) -> DaemonApi:
        """Return the daemon that is active now."""
        ...

    @property
    def inspect(self) -> InspectApi:
        return self.active().inspect

    @property
    def planning(self) -> PlanningApi:
        return self.active().planning

    @property
    def migrations(self) -> MigrationsApi:
        return self.active().migrations

    @property
    def attempts(self) -> AttemptsApi:
        return self.active().attempts

    def status(self) -> Status:
        return self.active().status()

    def plan(self) -> PlanReport:
        return self.active().plan()

    def explain(self, table: str, row: int | None, hottest: int) -> Explanation:
        return self.active().explain(table, row, hottest)

    def replan(self, reason: str, wait_seconds: float, *, force: bool = False, who: str = "") -> ReplanResult:
        return self.active().replan(reason, wait_seconds, force=force, who=who)

    def pause(self, reason: str, who: str = "") -> PauseState:
        return self.active().pause(reason, who)

    def resume(self, reason: str = "", who: str = "") -> PauseState:
        return self.active().resume(reason, who)

    def reload(self, reason: str = "", who: str = "") -> ReloadReport:
        return self.active().reload(reason, who)

    def preview_reload(self) -> ReloadReport:
        return self.active().preview_reload()

    def health(self) -> ProbeResult:
        return self.active().health()

    def ready(self) -> ProbeResult:
        return self.active().ready()
