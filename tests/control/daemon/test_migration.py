"""Waiting for a migration, and its progress."""

from __future__ import annotations

import pytest

from flexd.control.daemon.migration import ChunkedDelta, Migration
from flexd.control.daemon.migration_states import TransitionEvent
from flexd.core.placement import Placement
from tests.support.ranks_in_threads import target


def _applied(migration: Migration, rows: int) -> None:
    migration.count(chunks_pushed=1, rows_pushed=rows, rows_agreed=rows, rows_applied=rows)


def test_progress_has_steps_and_the_time_left_at_the_measured_rate() -> None:
    now = [100.0]
    chunks = ChunkedDelta(target(1, 50).delta_to(Placement.empty()).chunks(10), rows=50, bytes_to_copy=3200)
    migration = Migration("p", lambda _: chunks, clock=lambda: now[0])
    assert migration.report().eta_seconds is None
    assert set(migration.record.progress_by_part.values()) == {0.0}
    migration.fire(TransitionEvent.START)
    migration.begin(Placement.empty(7))
    progress = migration.record
    assert (progress.rows, progress.bytes_to_copy, progress.base_version) == (50, 3200, 7)
    assert (progress.progress, migration.report().eta_seconds) == (0.0, None)
    now[0] += 2.0
    _applied(migration, 10)
    assert migration.report().eta_seconds == pytest.approx(8.0), "10 rows in 2 s, 40 are left"
    now[0] += 2.0
    assert migration.report().eta_seconds == pytest.approx(16.0), "time without progress lowers the rate"
    migration.count(chunks_pushed=1, rows_pushed=20)
    assert migration.record.progress_by_part == {
        "wait": 1.0,
        "push": 0.6,
        "agree": 0.2,
        "apply": 0.2,
    }
    for _ in range(100):
        now[0] += 1.0
        migration.count(rows_applied=0)
    now[0] += 1.0
    _applied(migration, 20)
    # The rate covers the last RATE_SECONDS, not the whole migration: 20 rows in about 30 s.
    assert migration.report().eta_seconds == pytest.approx(20 * 31 / 20, rel=0.1)
    migration.fire(TransitionEvent.ABORT)
    assert migration.report().eta_seconds is None
    assert migration.record.progress_by_part["stop"] == pytest.approx(30 / 50)
