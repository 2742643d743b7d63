"""What the HTTP side needs of the daemon, and how the daemon's errors become HTTP statuses."""

from __future__ import annotations

from typing import Protocol

from flexd.core.errors import (
    ApiError,
    ConfigError,
    ControlError,
    FlexdError,
    LeaseError,
    PlacementError,
    PlanError,
    SnapshotError,
    StreamError,
    TopologyError,
)
from flexd.server.answers import ErrorBody, ErrorDetail, ProbeResult
from flexd.server.config_report import ReloadReport
from flexd.server.explain_report import Explanation
from flexd.server.inspect_api import InspectApi
from flexd.server.migrations_api import MigrationsApi
from flexd.server.plan_report import PlanReport
from flexd.server.planning_api import PlanningApi
from flexd.server.status import Status
from flexd.server.verbs import PauseState, ReplanResult


class DaemonApi(Protocol):
    """The daemon's verbs. Called from several HTTP threads at once; every call returns within its deadline.

    On failure each verb raises a FlexdError and has changed nothing: ``ApiError`` with an HTTP status of its own
    choice (409 while paused, say), ``PlanError`` if no plan can be made from what is known.
    """

    @property
    def inspect(self) -> InspectApi:
        """What shows tables, rows, ranks, traffic and configuration in detail."""
        ...

    @property
    def planning(self) -> PlanningApi:
        """What shows and applies proposals, and throttles migrations."""
        ...

    @property
    def migrations(self) -> MigrationsApi:
        """What shows migrations, those of the past included, and stops them."""
        ...

    def status(self) -> Status:
        """Everything on one screen. Takes no lock that ingest or a migration holds for long."""
        ...

    def plan(self) -> PlanReport:
        """A dry run: what a re-plan would change now. Moves nothing.

        Raises:
            PlanError: too few accesses, no ranks, or no cluster description to plan from.
        """
        ...

    def explain(self, table: str, row: int | None, hottest: int) -> Explanation:
        """Why a row (or the ``hottest`` rows of a table) is in its tier, by a plan made now. Moves nothing.

        Raises:
            PlanError: no plan can be made.
            ApiError: no such table or row (404).
        """
        ...

    def replan(self, reason: str, wait_seconds: float, *, force: bool = False, who: str = "") -> ReplanResult:
        """Plans now and starts the migration; waits at most ``wait_seconds`` for its end.

        Args:
            force: also from a profile that is too thin. who: asks for it. Both are recorded.

        Returns early when the daemon shuts down. A deadline that passes is no error: the outcome is ``timed_out``
        and the migration goes on.

        Raises:
            PlanError: no plan can be made.
            ApiError: paused (409), or shutting down (503).
        """
        ...

    def pause(self, reason: str, who: str = "") -> PauseState:
        """Holds planning and pushing at the next chunk boundary, also after a restart; ingest goes on."""
        ...

    def resume(self, reason: str = "", who: str = "") -> PauseState:
        """Ends a pause."""
        ...

    def reload(self, reason: str = "", who: str = "") -> ReloadReport:
        """Reads the configuration file again and takes from it what needs no restart.

        Raises:
            ConfigError: the file is wrong; what runs is as it was.
        """
        ...

    def preview_reload(self) -> ReloadReport:
        """What ``reload`` would come to now. Changes nothing.

        Raises:
            ConfigError: the file is wrong.
        """
        ...

    def health(self) -> ProbeResult:
        """Does the loop tick? Never blocks."""
        ...

    def ready(self) -> ProbeResult:
        """Is the daemon useful now (stream readable, ranks there)? Never blocks."""
        ...


_STATUS_OF: tuple[tuple[type[FlexdError], int], ...] = (
    (ConfigError, 422),
    (PlanError, 409),
    (PlacementError, 409),
    (TopologyError, 409),
    (ControlError, 503),
    (StreamError, 503),
    (SnapshotError, 503),
    (LeaseError, 503),
)


def http_status(error: FlexdError) -> int:
    """The HTTP status that an error is answered with."""
    if isinstance(error, ApiError):
        return error.status if 400 <= error.status <= 599 else 500
    return next((status for kind, status in _STATUS_OF if isinstance(error, kind)), 500)


def error_body(error: FlexdError) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(type=type(error).__name__, message=error.message, remedy=error.remedy))
