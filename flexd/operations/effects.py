"""The effect of migrations: the saving that a plan predicted, beside the steps before and after its migration."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from flexd.control.daemon.event_log import MigrationEvent
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import EffectRecord
from flexd.control.daemon.migration_states import TransitionEvent
from flexd.operations.step_times import StepSeconds, StepTimes


class EffectRecorder:
    """Records the effect of each migration before the next one changes the placement. Thread-safe.

    A migration that pushes no chunk leaves the placement as it is, and the one before it goes on being measured.

    Args:
        times: step times of the present topology generation.
        record: receives migration and effect; must not block.
    """

    def __init__(self, times: StepTimes, record: Callable[[str, EffectRecord], None]) -> None:
        self._times = times
        self._record = record
        self._lock = threading.Lock()
        self._measured: Migration | None = None
        """The newest migration that pushed a chunk, as of the newest start."""
        self._started: Migration | None = None

    def on_migration(self, event: MigrationEvent) -> None:
        """Record the effect of the migration before one that starts."""
        if event.transition is None or event.transition.event is not TransitionEvent.START:
            return
        self.store()
        with self._lock:
            self._measured, self._started = self._newest(), event.migration

    def end_generation(self) -> None:
        """Record the effect of the newest migration: other ranks train from now on, and their steps do not count."""
        self.store()
        with self._lock:
            self._measured = self._started = None

    def store(self) -> None:
        """Record the effect of the newest migration, if any of it is measured."""
        found = self.newest()
        if found is not None and (found[1].before_steps or found[1].after_steps):
            self._record(*found)

    def newest(self) -> tuple[str, EffectRecord] | None:
        """Return id and effect of the newest migration that pushed a chunk, as of now; None without one."""
        with self._lock:
            migration = self._newest()
        return None if migration is None else (migration.migration_id, effect_of(migration, self._times))

    def _newest(self) -> Migration | None:
        started = self._started
        return started if started is not None and started.record.chunks_pushed else self._measured


def effect_of(migration: Migration, times: StepTimes) -> EffectRecord:
    """Return the step times at the first and the last placement version of a migration."""
    record = migration.record
    if record.chunks_pushed == 0:
        return EffectRecord()
    after = times.at_version(record.last_version) if migration.done else None
    return EffectRecord(*_measured(times.at_version(record.base_version)), *_measured(after))


def _measured(steps: StepSeconds | None) -> tuple[float | None, float | None, int]:
    if steps is None:
        return None, None, 0
    error = steps.error_seconds
    return steps.mean_seconds, error if math.isfinite(error) else None, steps.steps
