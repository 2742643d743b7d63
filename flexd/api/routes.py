"""The operations of the admin API: one table, of which server, OpenAPI document and client are made."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, Protocol, TypeVar

from flexd.api.base import CommandRequest, ProbeResult, RequestBody
from flexd.api.migration import (
    AbortPreview,
    AbortPreviewRequest,
    AbortRequest,
    AbortResult,
    ApplyRequest,
    MigrationList,
    MigrationsRequest,
    PastPlacementRequest,
    ReplanRequest,
    ReplanResult,
    RollbackPreview,
    RollbackRequest,
    RollbackResult,
    ThrottleRequest,
    ThrottleStatus,
)
from flexd.api.plan import ExplainRequest, Explanation, PlanReport, UserNodePage, UsersRequest
from flexd.api.planning import ProposalList
from flexd.api.rank import RankPage
from flexd.api.status import ConfigReport, DaemonStatus, PauseRequest, PauseState, ReloadReport
from flexd.api.stream import HotRowPage, PageRequest, RowsRequest, TablePage, TablesRequest
from flexd.api.training import Timeline
from flexd.control.daemon.migration import MigrationRecord
from flexd.core.model import Model

Answer = TypeVar("Answer", bound=Model)


@dataclass(frozen=True)
class Operation(Generic[Answer]):
    """One operation. Its handler gets the parameters of the path and the fields of the request by name.

    Attributes:
        path: with its parameters in braces.
        answer: model of the response.
        handler: method of the daemon, with the part that has it: ``planning.apply``.
        text: its description.
        request: model of the body, or of the query of a GET; None if there is nothing to say.
        reads: a POST that computes and changes nothing: the scope "read" suffices.
        slow: it may take as long as a plan; the number of such calls at one time is limited.
        missing: the meaning of status 404; empty if it is not an answer.
    """

    method: Literal["GET", "POST"]
    path: str
    answer: type[Answer]
    handler: str
    text: str
    request: type[RequestBody] | None = None
    reads: bool = False
    slow: bool = False
    missing: str = ""

    @cached_property
    def parameters(self) -> list[str]:
        """The names in the path."""
        return re.findall(r"{(\w+)}", self.path)

    @cached_property
    def waits(self) -> bool:
        """True if a request says how long it waits for what it has started; status 202 if that goes on."""
        return self.request is not None and "wait_seconds" in self.request.model_fields


class DaemonApi(Protocol):
    """The daemon as the server needs it. Called from several HTTP threads at once.

    A handler that fails raises a FlexdError and has changed nothing: ``ApiError`` with its own HTTP status (409 while
    paused, 503 if this daemon does not have the data), ``PlanError`` if no plan can be made.
    """

    def call(self, route: Operation[Answer], **given: Any) -> Answer:
        """Carry out an operation. Raises ApiError (503) while the daemon waits for its state or its tables."""
        ...

    def status(self) -> DaemonStatus:
        """Return everything on one screen, as the daemon keeps it. Takes no lock of any part."""
        ...

    def health(self) -> ProbeResult:
        """Report whether the loop ticks. Never blocks."""
        ...

    def ready(self) -> ProbeResult:
        """Report whether the daemon is useful now (stream readable, ranks present). Never blocks."""
        ...


STATUS = Operation(
    "GET", "/v1/status", DaemonStatus, "status",
    "Health, stream, sketch, live ranks, placement, newest plan and migration.",
)  # fmt: skip
CONFIG = Operation(
    "GET", "/v1/config", ConfigReport, "inspect.config",
    "The effective configuration, defaults included, secrets replaced.",
)  # fmt: skip
TABLES = Operation(
    "GET", "/v1/tables", TablePage, "inspect.tables", "The tables: counters, accesses, and rows by tier.",
    TablesRequest,
)  # fmt: skip
ROWS = Operation(
    "POST", "/v1/rows", HotRowPage, "inspect.rows",
    "The hot rows of one table with their tiers, the most accessed first.",
    RowsRequest, reads=True, slow=True, missing="No such table.",
)  # fmt: skip
RANKS = Operation(
    "GET", "/v1/topology", RankPage, "inspect.ranks",
    "The ranks one by one: placement version, step, traffic and balance.", PageRequest,
)  # fmt: skip
TIMELINE = Operation(
    "GET", "/v1/timeline", Timeline, "inspect.timeline",
    "Traffic of the last half hour against row-wise sharding, and the plans that moved rows.",
)  # fmt: skip
PLAN = Operation(
    "POST", "/v1/plan", PlanReport, "planning.plan",
    "Dry run: the changes of a re-plan now, and the reasons. Moves nothing.", reads=True, slow=True,
)  # fmt: skip
EXPLAIN = Operation(
    "POST", "/v1/explain", Explanation, "planning.explain",
    "The reasons for the tiers of a row, or of the hottest rows of a table. Moves nothing.",
    ExplainRequest, reads=True, slow=True, missing="No such table or row.",
)  # fmt: skip
REPLAN = Operation(
    "POST", "/v1/replan", ReplanResult, "planning.replan",
    "Plans now, starts the migration and waits at most ``wait_seconds`` for its end.", ReplanRequest, slow=True,
)  # fmt: skip
PROPOSALS = Operation(
    "GET", "/v1/proposals", ProposalList, "planning.proposals", "The plans that are kept and can be applied."
)
PROPOSAL = Operation(
    "GET", "/v1/proposals/{plan_id}", PlanReport, "planning.proposal", "One kept plan; ``latest`` is the newest.",
    missing="No such proposal is kept.",
)  # fmt: skip
APPLY = Operation(
    "POST", "/v1/proposals/{plan_id}/apply", ReplanResult, "planning.apply",
    "Carries a kept plan out, if ranks, placement and accesses are still those it was made for.",
    ApplyRequest, slow=True, missing="No such proposal is kept.",
)  # fmt: skip
USERS = Operation(
    "GET", "/v1/affinity/users", UserNodePage, "planning.user_nodes",
    "The node in which the samples of each user are best trained, ascending by user id.", UsersRequest, slow=True,
)  # fmt: skip
THROTTLE = Operation(
    "GET", "/v1/throttle", ThrottleStatus, "operator.throttle", "The limits on migrations and their state."
)
SET_THROTTLE = Operation(
    "POST", "/v1/throttle", ThrottleStatus, "operator.set_throttle",
    "Changes the throttle from the next chunk on, until ``control.throttle`` changes in the configuration. A setting "
    "that is left out stays, 0 lifts a limit.", ThrottleRequest,
)  # fmt: skip
MIGRATIONS = Operation(
    "GET", "/v1/migrations", MigrationList, "migrations.migrations",
    "The migrations of this daemon and of those before it, the newest first.", MigrationsRequest,
)  # fmt: skip
MIGRATION = Operation(
    "GET", "/v1/migrations/{migration_id}", MigrationRecord, "migrations.migration",
    "One migration with every change of its state; ``latest`` is the newest.", missing="No such migration is kept.",
)  # fmt: skip
PREVIEW_ABORT = Operation(
    "POST", "/v1/abort/preview", AbortPreview, "migrations.preview_abort",
    "Dry run: the migration that would stop, its position, and the rows that a rollback would move.",
    AbortPreviewRequest, reads=True, slow=True,
)  # fmt: skip
ABORT = Operation(
    "POST", "/v1/abort", AbortResult, "migrations.abort",
    "Stops the running migration at its next chunk; with ``rollback`` restores the placement it started from.",
    AbortRequest, slow=True,
)  # fmt: skip
PREVIEW_ROLLBACK = Operation(
    "POST", "/v1/rollback/preview", RollbackPreview, "migrations.preview_rollback",
    "Dry run: the rows that a rollback of an ended migration, or to a version, would move.",
    PastPlacementRequest, reads=True, slow=True, missing="No such migration is kept.",
)  # fmt: skip
ROLLBACK = Operation(
    "POST", "/v1/rollback", RollbackResult, "migrations.rollback",
    "Restores the placement before a migration that has ended, or of a version, and holds such plans back for a while.",
    RollbackRequest, slow=True, missing="No such migration is kept.",
)  # fmt: skip
PAUSE = Operation(
    "POST", "/v1/pause", PauseState, "operator.pause",
    "Holds planning and pushing at the next chunk, also after a restart; ingest goes on.", PauseRequest,
)  # fmt: skip
RESUME = Operation("POST", "/v1/resume", PauseState, "operator.resume", "Ends a pause.", CommandRequest)
PREVIEW_RELOAD = Operation(
    "POST", "/v1/config/reload/preview", ReloadReport, "preview_reload",
    "Dry run: the keys of the file that a reload would apply now, and those that need a restart.", reads=True,
)  # fmt: skip
RELOAD = Operation(
    "POST", "/v1/config/reload", ReloadReport, "reload",
    "Reads the configuration file again. A file that is wrong changes nothing.", CommandRequest,
)  # fmt: skip
ROUTES: tuple[Operation[Any], ...] = tuple(each for each in list(globals().values()) if isinstance(each, Operation))
