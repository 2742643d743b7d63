"""Events of migrations, dispatched to the log, the history and the callers of ``Coordinator.migrate``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flexd.control.daemon.event_log import EventLog
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_states import MigrationState, Transition

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MigrationEvent:
    """A transition of a migration, or the completion of its figures.

    Attributes:
        transition: None means that every chunk of an ended migration is applied or void: its figures are final.
    """

    migration: Migration
    transition: Transition | None


_RUNNING = frozenset({MigrationState.PUSHING, MigrationState.APPLYING, MigrationState.ABORTING})

OnMigration = Callable[[MigrationEvent], None]


class MigrationEventDispatcher:
    """Logs and records migration events; belongs to the coordinator's thread.

    Args:
        events: receives every transition.
        on_migration: called with every event; what it raises is logged.
    """

    def __init__(self, events: EventLog, on_migration: OnMigration | None) -> None:
        self._events = events
        self._on_migration = on_migration

    def dispatch(self, events: Iterable[MigrationEvent], current: Migration | None) -> None:
        """Pass on ``events``, and call ``on_progress`` of ended migrations and of the ``current`` one."""
        for event in events:
            if event.transition is not None:
                self._log(event.migration, event.transition)
            if self._on_migration is not None:
                try:
                    self._on_migration(event)
                except Exception:
                    logger.exception("migration %s: on_migration failed", event.migration.migration_id)
            if event.transition is None:
                _notify(event.migration)
        # Only this thread changes these states, so the end of a migration is reported once.
        if current is not None and current.state in _RUNNING:
            _notify(current)

    def _log(self, migration: Migration, transition: Transition) -> None:
        self._events.emit(
            f"migration_{transition.after.value}", migration_id=migration.migration_id, plan_id=migration.plan_id,
            before=transition.before.value if transition.before else "", who=migration.metadata.who,
            reason=transition.reason, rows=migration.progress.rows, rows_pushed=transition.rows_pushed,
            rows_applied=transition.rows_applied, version=transition.version,
        )  # fmt: skip


def _notify(migration: Migration) -> None:
    try:
        migration.notify()
    except Exception:
        logger.exception("migration %s: its progress callback failed", migration.migration_id)
