"""Records of migrations, transitions and actions have the fields of their sources."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.control.daemon.migration import Migration, MigrationMetadata
from flexd.control.daemon.migration_states import TransitionEvent
from flexd.operations.history.records import MigrationRecord
from flexd.planner.delta import Delta


@pytest.fixture
def migration() -> Migration:
    chunks = [Delta(np.arange(30), np.zeros(30, np.uint8), np.ones(30, np.uint8))]
    made = Migration("plan", chunks, metadata=MigrationMetadata("m", "parent", "drift", "ann", "moved"))
    made.fire(TransitionEvent.START, "")
    made.count(rows=30, rows_pushed=20, chunks_pushed=3, bytes_pushed=100, base_version=5, last_version=8)
    made.count(rows_applied=10, chunks_applied=2, copied_bytes=640)
    return made


def test_a_clock_that_was_set_back_gives_a_duration_of_zero(migration: Migration) -> None:
    record = replace(MigrationRecord.of(migration, settled=True), created_unix_seconds=10.0)
    assert replace(record, ended_unix_seconds=12.5).seconds == 2.5
    assert replace(record, ended_unix_seconds=8.0).seconds == 0.0
