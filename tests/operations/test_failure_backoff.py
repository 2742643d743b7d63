"""Waiting of automatic planning after failed migrations."""

from __future__ import annotations

from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import MigrationRecord, TransitionEvent
from flexd.core.placement import Placement
from flexd.operations.autoplan import FIRST_SECONDS, FailureBackoff


def ended(event: TransitionEvent | None, generation: int | None = 3, chunks_applied: int = 0) -> Migration:
    migration = Migration(MigrationRecord(migration_id="p", generation=generation), Placement.empty())
    migration.fire(TransitionEvent.START)
    migration.count(chunks_applied=chunks_applied)
    if event is TransitionEvent.APPLIED:
        migration.fire(TransitionEvent.EXHAUSTED)
    if event is not None:
        migration.fire(event, "rank 2 refused chunk 1: no memory" if event is TransitionEvent.FAIL else "")
    return migration


def test_progress_starts_the_waits_over() -> None:
    failure_backoff = FailureBackoff()
    for now in (0.0, 100.0, 200.0):
        failure_backoff.observe(ended(TransitionEvent.FAIL), now)
    assert failure_backoff.seconds(200.0, 3) == 4 * FIRST_SECONDS
    failure_backoff.observe(ended(TransitionEvent.FAIL, chunks_applied=2), 300.0)
    assert failure_backoff.seconds(300.0, 3) == FIRST_SECONDS
    failure_backoff.observe(ended(TransitionEvent.APPLIED), 301.0)
    assert failure_backoff.seconds(301.0, 3) == 0.0
    failure_backoff.observe(ended(TransitionEvent.FAIL), 400.0)
    assert failure_backoff.seconds(400.0, 3) == FIRST_SECONDS
