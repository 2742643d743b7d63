"""Migrations of a daemon that is not there."""

from __future__ import annotations

from collections.abc import Callable

from flexd.api.execution import AbortPreview, AbortResult, RollbackPreview
from flexd.api.migration import MigrationList
from flexd.control.daemon.migration_record import ActionRecord, MigrationRecord, Transition, VerificationReport
from flexd.control.daemon.migration_states import MigrationState
from flexd.core.errors import ApiError

ENDED = MigrationRecord(
    migration_id="p7", plan_id="p7", parent_plan_id="p6", trigger="drift", requested_by="flexd",
    reason="drift 1.20 > 1.05",
    state="committed", rows=4000, rows_pushed=4000, rows_applied=4000, chunks_pushed=4, chunks_applied=4,
    copied_bytes=2_048_000, pushed_bytes=40_000, base_version=12, last_version=16, created_unix_seconds=1_700_000_000.0,
    started_unix_seconds=1_700_000_000.5, ended_unix_seconds=1_700_000_012.0, settled=True,
    predicted_saving_seconds=2e-3, measured_saving_seconds=-1.5e-3, measured_error_seconds=2e-4,
    verification=VerificationReport(
        migration_id="p7", state="slower", change=0.015, low=0.004, high=0.026, pairs=12, steps=640,
        message="1.5 % slower (95 % interval +0.4 % to +2.6 %, 12 pairs of blocks)",
    ),
)  # fmt: skip
STOPPED = MigrationRecord(
    migration_id="p8", plan_id="p8", parent_plan_id="p7", trigger="manual", requested_by="ada@host", reason="campaign",
    state="aborted", problem="aborted by ada@host: too slow: stopped at version 18, 2,000 of 9,000 rows applied",
    rows=9000, rows_pushed=2000, rows_applied=2000, chunks_pushed=2, chunks_applied=2, copied_bytes=1_024_000,
    pushed_bytes=20_000, base_version=16, last_version=18, created_unix_seconds=1_700_000_100.0,
    started_unix_seconds=1_700_000_100.0, ended_unix_seconds=1_700_000_103.5, settled=True,
    predicted_saving_seconds=4e-4,
)  # fmt: skip
PAUSED = ActionRecord(unix_seconds=1_700_000_050.0, kind="pause", requested_by="bob@host", reason="maintenance")
FORCED = ActionRecord(
    unix_seconds=1_700_000_060.0, kind="override", requested_by="ada@host", reason="campaign",
    detail="plan p8 in spite of samples",
)  # fmt: skip


class FakeMigrations:
    """Calls ``entered`` with its name and arguments first, which may raise."""

    def __init__(self, entered: Callable[..., None], outcome: Callable[[], str]) -> None:
        self._entered = entered
        self._outcome = outcome

    def migrations(self, limit: int, state: MigrationState | None) -> MigrationList:
        self._entered("migrations", limit, state)
        kept = [entry for entry in (STOPPED, ENDED) if state in (None, entry.state)]
        actions = (FORCED, PAUSED) if state is None else ()
        return MigrationList(migrations=tuple(kept[:limit]), actions=actions[:limit])

    def migration(self, migration_id: str) -> MigrationRecord:
        self._entered("migration", migration_id)
        if migration_id not in ("latest", "p8"):
            raise ApiError(f"no migration {migration_id!r} is kept", status=404, remedy="flexd get history shows those")
        submitted = Transition(number=0, unix_seconds=1_700_000_100.0, after="pending", reason="campaign")
        stopped = Transition(
            number=3, unix_seconds=1_700_000_103.5, event="stopped", before="aborting", after="aborted",
            rows_pushed=2000, rows_applied=2000, version=18,
        )  # fmt: skip
        return STOPPED.model_copy(update={"transitions": (submitted, stopped)})

    def preview_abort(self, *, rollback: bool) -> AbortPreview:
        self._entered("preview_abort", rollback)
        running = MigrationRecord(
            migration_id="p8", plan_id="p8", state="pushing", rows=9000, rows_applied=1000,
            rows_pushed=2000, chunks_pushed=2, chunks_applied=1, base_version=16, last_version=18,
        )  # fmt: skip
        back = RollbackPreview(to_version=16, promotions=300, demotions=1700, bytes=153_600)
        return AbortPreview(migration=running, waiting=("p9",), rollback=back if rollback else None)

    def abort(self, *, rollback: bool, reason: str, wait_seconds: float, requested_by: str) -> AbortResult:
        self._entered("abort", rollback, reason, wait_seconds, requested_by)
        outcome = self._outcome()
        if outcome == "committed":
            outcome = "rolled_back" if rollback else "stopped"
        stopped = MigrationRecord(
            migration_id="p8", plan_id="p8", state="aborted", rows=9000, rows_applied=2000,
            base_version=16, last_version=18,
        )  # fmt: skip
        back = MigrationRecord(migration_id="p8.rollback", plan_id="p8.rollback", state="committed")
        return AbortResult(
            outcome=outcome, migration=stopped, rollback=back if rollback else None, placement_version=18,
            message="migration p8 is aborted: 2,000 of 9,000 rows applied, placement version 18",
        )  # fmt: skip
