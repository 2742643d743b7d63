"""Migrations: lists of the history, and their counts."""

from typing import Annotated, Literal

from pydantic import Field

from flexd.api.base import CommandRequest, Reason, RequestBody
from flexd.api.plan import PlanReport
from flexd.control.daemon.migration import ActionRecord, MigrationRecord, MigrationState
from flexd.core.model import Model, counter, gauge

WaitName = Literal["bytes_per_step", "bytes_per_second"]


class ThrottleStatus(Model):
    """The limits on migrations and their state. Bytes are of row values and optimizer state copied; counters run since
    the daemon started."""

    bytes_per_step: int | None = None
    """Limit at one step boundary of every rank; null: no limit but the ranks' own."""
    bytes_per_second: int | None = None
    """Limit in the long run; null: no limit."""
    waits_for: WaitName | None = None
    """Limit that holds the next chunk; null if none does."""
    waiting_seconds: dict[WaitName, float] = Field(default_factory=dict)
    released_bytes: int = 0
    released_chunks: int = 0

    FAMILIES = (
        gauge("flexd_throttle_bytes_per_step", "Limit; NaN: the ranks' own alone.", "bytes_per_step"),
        gauge("flexd_throttle_bytes_per_second", "Limit; NaN without one.", "bytes_per_second"),
        counter("flexd_throttle_released_bytes", "Row values and state released.", "released_bytes"),
        counter(
            "flexd_throttle_waiting_seconds", "Time in which a chunk was held, by what it waited for.",
            "waiting_seconds", ("wait",),
        ),
    )  # fmt: skip


class ThrottleRequest(CommandRequest):
    """Body of ``POST /v1/throttle``. Settings that are left out stay unchanged."""

    bytes_per_step: Annotated[int, Field(ge=0, le=2**50)] | None = None
    """At one step boundary of every rank; 0 lifts the limit."""
    bytes_per_second: Annotated[int, Field(ge=0, le=2**50)] | None = None
    """In the long run; 0 lifts the limit."""


class MigrationList(Model):
    """Migrations and other commands, newest first."""

    migrations: tuple[MigrationRecord, ...] = ()
    """At most as many as requested, without their transitions."""
    actions: tuple[ActionRecord, ...] = ()
    """Other commands, at most as many; none if migrations in one state were requested."""
    problem: str | None = None
    """Reason why the newest are not in the history's file yet; null if they are."""


class MigrationsRequest(RequestBody):
    """A list of migrations."""

    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    """Migrations at most, the newest."""
    state: MigrationState | None = None


class MigrationCounts(Model):
    """All migrations since the daemon started."""

    ended: dict[str, int] = Field(default_factory=dict)
    """Migrations ended, by final state: ``committed``, ``superseded``, ``aborted``, ``failed``."""
    rows: int = 0
    bytes: int = 0
    chunks: int = 0
    illegal_transitions: int = 0
    """Transitions that the state table refused: a fault of flexd."""
    lost_entries: int = 0

    FAMILIES = (
        counter("flexd_migrations", "Migrations ended, by final state.", "ended", ("state",)),
        counter("flexd_migration_rows", "Rows whose tier changed on every rank.", "rows"),
        counter("flexd_migration_bytes", "Row values and optimizer state copied.", "bytes"),
        counter("flexd_migration_chunks", "Chunks applied by every rank.", "chunks"),
        counter("flexd_history_lost_entries", "Entries of the history that were dropped unwritten.", "lost_entries"),
    )


WaitSeconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]


class ReplanRequest(CommandRequest):
    """Body of ``POST /v1/replan``."""

    reason: Reason = "requested by hand"
    wait_seconds: WaitSeconds = 0.0
    """Time to wait for the migration to end; 0 returns as soon as the plan is made."""
    force: bool = False
    """Carry it out although a gate is closed: the profile is too thin, or it saves too little; recorded."""


class ApplyRequest(ReplanRequest):
    """Body of ``POST /v1/proposals/{plan_id}/apply``."""

    reason: Reason = "applied by hand"


ReplanOutcome = Literal[
    "unchanged", "withheld", "accepted", "committed", "superseded", "aborted", "failed", "timed_out"
]


class ReplanResult(Model):
    """The result of a re-plan."""

    outcome: ReplanOutcome
    """``unchanged``: nothing to move. ``withheld``: it would save less than ``planner.min_saving``, and nothing moves.
    ``accepted``: the migration runs (no wait was requested). ``committed``: every rank has applied it. ``timed_out``:
    still running at the end of the wait; it goes on."""
    plan: PlanReport | None = None
    migration: MigrationRecord | None = None
    placement_version: int = 0
    """The version that every rank has agreed on."""
    message: str = ""


class AbortRequest(CommandRequest):
    """Body of ``POST /v1/abort``."""

    rollback: bool = False
    """Restore the placement that the migration started from."""
    wait_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 10.0
    """Time to wait for the end of the migration and of the rollback; 0 returns as soon as the abort is accepted."""


class AbortPreviewRequest(RequestBody):
    """Body of ``POST /v1/abort/preview``."""

    rollback: bool = False
    """Count the rows that a rollback would move."""


RollbackOutcome = Literal["rolled_back", "accepted", "timed_out", "rollback_failed"]
AbortOutcome = Literal["stopped", "ended"] | RollbackOutcome


class AbortResult(Model):
    """The result of an abort."""

    outcome: AbortOutcome
    """``stopped``: at a chunk, and no chunk is in flight. ``rolled_back``: stopped, and every rank has the placement
    that it started from. ``ended``: it ended before it could be stopped. ``accepted``, ``timed_out``: still stopping
    or rolling back, which goes on. ``rollback_failed``: stopped, but its rollback ended before all was applied."""
    migration: MigrationRecord
    rollback: MigrationRecord | None = None
    placement_version: int = 0
    message: str = ""


class PastPlacementRequest(RequestBody):
    """Body of ``POST /v1/rollback/preview``: one of the two."""

    migration_id: Annotated[str, Field(max_length=500)] = ""
    """Migration, or its plan, before which the placement is restored; ``latest`` is the newest that is kept."""
    to_version: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """Version whose placement is restored; 0: no row has copies or lives outside its home."""


class RollbackRequest(CommandRequest, PastPlacementRequest):
    """Body of ``POST /v1/rollback``: one of ``migration_id`` and ``to_version``."""

    wait_seconds: WaitSeconds = 10.0
    """Time to wait for the end of the rollback; 0 returns as soon as it has started."""


class RollbackResult(Model):
    """The result of a rollback."""

    outcome: RollbackOutcome
    """``rolled_back``: every rank has the earlier placement. ``accepted``, ``timed_out``: it goes on.
    ``rollback_failed``: it ended before all was applied."""
    migration: MigrationRecord
    """The rollback, a migration like others."""
    takes_back: tuple[str, ...] = ()
    """Ids of the migrations whose changes it takes back, newest first."""
    placement_version: int = 0
    message: str = ""


class RollbackPreview(Model):
    """The rows that a rollback would move if it began now, without those of chunks that are in flight."""

    to_version: int
    promotions: int = 0
    demotions: int = 0
    bytes: int = 0
    """Row values and optimizer state of the promoted rows, each once."""
    takes_back: tuple[str, ...] = ()
    """Ids of the ended migrations whose changes it takes back, newest first."""


class AbortPreview(Model):
    """The effect that an abort would have now."""

    migration: MigrationRecord
    """The migration that would stop after the chunks pushed so far; for a rollback alone, the one that ended with an
    earlier daemon."""
    waiting: tuple[str, ...] = ()
    """Ids of migrations behind it that would not be started."""
    rollback: RollbackPreview | None = None
