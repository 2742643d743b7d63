"""What becomes of migrations, told to whoever keeps account of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_states import MigrationState, Transition

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MigrationEvent:
    """One thing that has become of a migration.

    Attributes:
        transition: None says that every chunk of an ended migration is applied or void: its figures are final.
    """

    migration: Migration
    transition: Transition | None


_RUNNING = frozenset({MigrationState.PUSHING, MigrationState.APPLYING, MigrationState.ABORTING})

OnMigration = Callable[[MigrationEvent], None]


class MigrationEventDispatcher:
    """For the coordinator's thread alone.

    Args:
        on_event: told of every transition, as (name, fields) of a log line.
        on_migration: told of all news; what it raises is logged.
    """

    def __init__(self, on_event: Callable[..., None], on_migration: OnMigration | None) -> None:
        self._on_event = on_event
        self._on_migration = on_migration

    def tell(self, news: Iterable[MigrationEvent], current: Migration | None) -> None:
        """Passes on ``news``; migrations whose figures are final, and the ``current`` one, call ``on_progress``."""
        for each in news:
            if each.transition is not None:
                self._log(each.migration, each.transition)
            if self._on_migration is not None:
                try:
                    self._on_migration(each)
                except Exception:
                    logger.exception("migration %s: the account of it failed", each.migration.migration_id)
            if each.transition is None:
                _notify(each.migration)
        # Only this thread moves a migration on from these, so it is told of its end once.
        if current is not None and current.state in _RUNNING:
            _notify(current)

    def _log(self, migration: Migration, transition: Transition) -> None:
        self._on_event(
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
