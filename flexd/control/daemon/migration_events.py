"""Events of migrations, dispatched to the log and to what observes migrations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flexd.control.daemon.event_log import EventLog
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_states import Transition

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MigrationEvent:
    """A transition of a migration, or the completion of its figures.

    Attributes:
        transition: None means that every chunk of an ended migration is applied or void: its figures are final.
    """

    migration: Migration
    transition: Transition | None


OnMigration = Callable[[MigrationEvent], None]


def dispatch(events: Iterable[MigrationEvent], log: EventLog, on_migration: OnMigration | None) -> None:
    """Log the transitions and pass on all events; what ``on_migration`` raises is logged."""
    for event in events:
        migration, transition = event.migration, event.transition
        if transition is not None:
            log.emit(
                f"migration_{transition.after.value}", migration_id=migration.migration_id, plan_id=migration.plan_id,
                before=transition.before.value if transition.before else "", who=migration.record.who,
                reason=transition.reason, rows=migration.record.rows, rows_pushed=transition.rows_pushed,
                rows_applied=transition.rows_applied, version=transition.version,
            )  # fmt: skip
        if on_migration is not None:
            try:
                on_migration(event)
            except Exception:
                logger.exception("migration %s: on_migration failed", migration.migration_id)
