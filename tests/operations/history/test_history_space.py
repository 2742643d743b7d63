"""The files of the history stay small on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flexd.control.daemon.migration import Migration, MigrationMetadata
from flexd.control.daemon.migration_events import MigrationEvent
from flexd.control.daemon.migration_states import TransitionEvent
from flexd.core.placement import Delta
from flexd.operations.history.history import MigrationHistory

_FLUSH_SECONDS = 30.0
_MIGRATIONS = 600


def test_the_log_beside_the_file_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "migrations.sqlite"
    history = MigrationHistory(path, 20, lambda *_: None, 0.01)
    history.start()
    largest = 0
    for number in range(_MIGRATIONS):
        chunk = Delta(np.arange(3), np.zeros(3, np.uint8), np.ones(3, np.uint8))
        metadata = MigrationMetadata(f"m{number}", "parent", "manual", "ada", "x" * 300)
        migration = Migration(f"plan-{number}", [chunk], metadata=metadata)
        migration.observe(lambda of, transition: history.record_migration(MigrationEvent(of, transition)))
        migration.fire(TransitionEvent.START, "y" * 300)
        migration.fire(TransitionEvent.FAIL, "z" * 300)
        assert history.flush(_FLUSH_SECONDS)
        largest = max(largest, sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert history.stop(_FLUSH_SECONDS)
    assert largest < 1.5 * 2**20
