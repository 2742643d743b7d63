"""The saving of migrations as the steps before and after them differ."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from flexd.control.daemon.event_log import MigrationEvent
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import MigrationRecord
from flexd.control.daemon.migration_states import TransitionEvent
from flexd.operations.step_times import StepTimes


class EffectRecorder:
    """Records the measured saving of each migration before the next one changes the placement. Thread-safe.

    A migration that pushes no chunk leaves the placement as it is, and the one before it goes on being measured.

    Args:
        times: step times of the present topology generation.
        record: receives the record of the migration; must not block.
    """

    def __init__(self, times: StepTimes, record: Callable[[MigrationRecord], None]) -> None:
        self._times = times
        self._record = record
        self._lock = threading.Lock()
        self._measured: Migration | None = None
        """The newest migration that pushed a chunk, as of the newest start."""
        self._started: Migration | None = None

    def on_migration(self, event: MigrationEvent) -> None:
        """Record the saving of the migration before one that starts."""
        if event.transition is None or event.transition.event is not TransitionEvent.START:
            return
        self.store()
        with self._lock:
            self._measured, self._started = self._newest(), event.migration

    def end_generation(self) -> None:
        """Record the saving of the newest migration: other ranks train from now on, and their steps do not count."""
        self.store()
        with self._lock:
            self._measured = self._started = None

    def store(self) -> None:
        """Record the saving of the newest migration, if it is measured."""
        with self._lock:
            migration = self._newest()
        measured = None if migration is None else self.add_to(migration.record)
        if measured is not None and measured.measured_saving_seconds is not None:
            self._record(measured)

    def add_to(self, record: MigrationRecord) -> MigrationRecord:
        """Return the record with its saving as measured by now, if it is of the newest migration that moved rows."""
        with self._lock:
            newest = self._newest()
        if newest is None or newest.migration_id != record.migration_id or not newest.done:
            return record
        before, after = (self._times.at_version(at) for at in (record.base_version, record.last_version))
        if before is None or after is None:
            return record
        error = math.hypot(before[1], after[1])
        saving = {
            "measured_saving_seconds": before[0] - after[0],
            "measured_error_seconds": error if math.isfinite(error) else None,
        }
        return record.model_copy(update=saving)

    def _newest(self) -> Migration | None:
        started = self._started
        return started if started is not None and started.record.chunks_pushed else self._measured
