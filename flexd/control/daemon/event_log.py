"""Events of the control channel and of migrations: one log line each, passed on to what observes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import Transition
from flexd.core.log_fields import log_event


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
                before=transition.before.value if transition.before else "", requested_by=migration.record.requested_by,
                reason=transition.reason, rows=migration.record.rows, rows_pushed=transition.rows_pushed,
                rows_applied=transition.rows_applied, version=transition.version,
            )  # fmt: skip
        if on_migration is not None:
            try:
                on_migration(event)
            except Exception:
                logger.exception("migration %s: on_migration failed", migration.migration_id)


logger = logging.getLogger(__name__)

OnEvent = Callable[[str, Mapping[str, object]], None]


class EventLog:
    """Logs events and passes them to ``on_event`` as (name, fields); what that raises is logged."""

    def __init__(self, on_event: OnEvent | None = None) -> None:
        self._on_event = on_event

    def emit(self, name: str, **fields: object) -> None:
        log_event(logger, logging.INFO, f"control channel: {name}", fields)
        if self._on_event is not None:
            try:
                self._on_event(name, fields)
            except Exception:
                logger.exception("control channel: the event callback failed")
