"""The interface of a daemon that the admin API serves. Called from several HTTP threads at once."""

from __future__ import annotations

from typing import Protocol

from flexd.api.abort import AbortPreview, AbortResult
from flexd.api.affinity import UserNodePage
from flexd.api.attempt import AttemptList, AttemptResult
from flexd.api.config import ConfigReport, ReloadReport
from flexd.api.errors import ProbeResult
from flexd.api.explanation import Explanation
from flexd.api.migration import MigrationDetail, MigrationList, MigrationStateName
from flexd.api.pause import PauseState
from flexd.api.plan import PlanReport
from flexd.api.planning import ProposalList
from flexd.api.rank import RankPage
from flexd.api.replan import ReplanResult
from flexd.api.status import Status
from flexd.api.table import HotRowPage, TableOrder, TablePage
from flexd.api.throttle import ThrottleStatus
from flexd.api.timeline import Timeline


class InspectApi(Protocol):
    """Details of tables, rows, ranks, traffic and configuration. Reads only.

    Raises (every method):
        ApiError: this daemon does not have the data (503 while it waits for its state or its tables).
    """

    def config(self) -> ConfigReport:
        """Return the effective configuration with secrets replaced."""
        ...

    def tables(self, offset: int, limit: int, order: TableOrder) -> TablePage:
        """Return at most ``limit`` tables from ``offset`` on."""
        ...

    def rows(self, table: str, offset: int, limit: int) -> HotRowPage:
        """Return at most ``limit`` hot rows of a table from ``offset`` on. Copies the table's counters.

        Raises:
            ApiError: no such table (404).
        """
        ...

    def ranks(self, offset: int, limit: int) -> RankPage:
        """Return at most ``limit`` ranks from ``offset`` on."""
        ...

    def timeline(self) -> Timeline:
        """Return traffic and plans of the last half hour."""
        ...


class PlanningApi(Protocol):
    """Proposals and the throttle of migrations.

    Raises (every method):
        ApiError: this daemon plans nothing (503 while it waits for its state or its tables).
    """

    def proposals(self) -> ProposalList:
        """Return the kept plans, newest first."""
        ...

    def proposal(self, plan_id: str) -> PlanReport:
        """Return a kept plan; ``latest`` is the newest.

        Raises:
            ApiError: no plan of that id is kept (404).
        """
        ...

    def user_nodes(self, offset: int, limit: int) -> UserNodePage:
        """Return at most ``limit`` users and their nodes from ``offset`` on.

        Raises:
            ApiError: no user's node is known (409).
        """
        ...

    def apply(self, plan_id: str, reason: str, wait_seconds: float, *, force: bool, who: str) -> ReplanResult:
        """Carry a kept plan out; waits and returns like ``DaemonApi.replan``.

        Args:
            force: carry it out although it was made from too little data.

        Raises:
            PlanError: ranks, placement or accesses have changed since it was made, or it was made from too little data.
            ApiError: no plan of that id is kept (404), paused (409), or shutting down (503).
        """
        ...

    def throttle(self) -> ThrottleStatus:
        """Return the limits on migrations and their state."""
        ...

    def set_throttle(
        self,
        bytes_per_step: int | None,
        bytes_per_second: int | None,
        adaptive: bool | None,
        *,
        reason: str = "",
        who: str = "",
    ) -> ThrottleStatus:
        """Change the throttle from the next chunk on: None keeps a setting, 0 lifts a limit. Survives a restart."""
        ...


class MigrationsApi(Protocol):
    """The history of migrations, and abort.

    Raises (every method):
        ApiError: this daemon migrates nothing (503 while it waits for its state or its tables).
    """

    def migrations(self, limit: int, state: MigrationStateName | None) -> MigrationList:
        """Return at most ``limit`` migrations, newest first; only those in ``state`` if one is given.

        Raises:
            SnapshotError: the history's file cannot be read.
        """
        ...

    def migration(self, migration_id: str) -> MigrationDetail:
        """Return one migration of the history; ``latest`` is the newest.

        Raises:
            ApiError: no migration of that id is kept (404).
            SnapshotError: the history's file cannot be read.
        """
        ...

    def preview_abort(self, *, rollback: bool) -> AbortPreview:
        """Return what ``abort`` would do now. Changes nothing.

        Raises:
            ApiError: as for ``abort``.
        """
        ...

    def abort(self, *, rollback: bool, reason: str, wait_seconds: float, who: str) -> AbortResult:
        """Stop the running migration at its next chunk; with ``rollback`` restore the placement it started from.

        Waits at most ``wait_seconds``; a deadline that passes is no error.

        Raises:
            ApiError: no migration is running (409), no ranks to roll back to (409), or shutting down (503).
        """
        ...


class AttemptsApi(Protocol):
    """The attempts of the training job.

    Raises (every method):
        ApiError: this daemon has no ranks (503 while it waits for its state or its tables).
    """

    def attempts(self) -> AttemptList:
        """Return the attempt that holds the job, those that wait, and those that ended within an hour."""
        ...

    def prefer(self, attempt: str, reason: str = "", who: str = "") -> AttemptResult:
        """Give the job to an attempt, although the ranks of the present one are alive.

        Raises:
            ApiError: there is no such attempt (404).
        """
        ...

    def forget(self, attempt: str, reason: str = "", who: str = "") -> AttemptResult:
        """Drop what is known of an attempt.

        Raises:
            ApiError: there is no such attempt (404), or its ranks hold the job (409).
        """
        ...


class DaemonApi(Protocol):
    """Everything that the admin API serves; every call returns within its deadline.

    On failure each command raises a FlexdError and has changed nothing: ``ApiError`` with its own HTTP status
    (409 while paused, for example), ``PlanError`` if no plan can be made from the available data.
    """

    @property
    def inspect(self) -> InspectApi:
        """Details of tables, rows, ranks, traffic and configuration."""
        ...

    @property
    def planning(self) -> PlanningApi:
        """Proposals and the throttle."""
        ...

    @property
    def migrations(self) -> MigrationsApi:
        """The history of migrations, and abort."""
        ...

    @property
    def attempts(self) -> AttemptsApi:
        """The attempts of the training job."""
        ...

    def status(self) -> Status:
        """Return everything on one screen. Takes no lock that ingest or a migration holds for long."""
        ...

    def plan(self) -> PlanReport:
        """Return what a re-plan would change now (a dry run). Moves nothing.

        Raises:
            PlanError: too few accesses, no ranks, or no cluster description to plan from.
        """
        ...

    def explain(self, table: str, row: int | None, hottest: int) -> Explanation:
        """Explain the tier of a row, or of the ``hottest`` rows of a table, by a plan made now. Moves nothing.

        Raises:
            PlanError: no plan can be made.
            ApiError: no such table or row (404).
        """
        ...

    def replan(self, reason: str, wait_seconds: float, *, force: bool = False, who: str = "") -> ReplanResult:
        """Plan now and start the migration; wait at most ``wait_seconds`` for its end.

        Args:
            force: carry it out although a gate is closed; recorded.
            who: the person or program that requests it; recorded.

        Returns early when the daemon shuts down. A deadline that passes is no error: the outcome is ``timed_out``
        and the migration goes on.

        Raises:
            PlanError: no plan can be made.
            ApiError: paused (409), or shutting down (503).
        """
        ...

    def pause(self, reason: str, who: str = "") -> PauseState:
        """Hold planning and pushing at the next chunk boundary, also after a restart; ingest goes on."""
        ...

    def resume(self, reason: str = "", who: str = "") -> PauseState:
        """End a pause."""
        ...

    def reload(self, reason: str = "", who: str = "") -> ReloadReport:
        """Read the configuration file again and apply the keys that need no restart.

        Raises:
            ConfigError: the file is wrong; the running configuration is unchanged.
        """
        ...

    def preview_reload(self) -> ReloadReport:
        """Return what ``reload`` would do now. Changes nothing.

        Raises:
            ConfigError: the file is wrong.
        """
        ...

    def health(self) -> ProbeResult:
        """Report whether the loop ticks. Never blocks."""
        ...

    def ready(self) -> ProbeResult:
        """Report whether the daemon is useful now (stream readable, ranks present). Never blocks."""
        ...
