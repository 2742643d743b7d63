"""Dispatch of migration events to log, history and progress callbacks."""

from __future__ import annotations

from collections.abc import Mapping

from flexd.control.daemon.event_log import EventLog
from flexd.control.daemon.migration import Migration, MigrationMetadata
from flexd.control.daemon.migration_events import MigrationEvent, MigrationEventDispatcher
from flexd.control.daemon.migration_states import TransitionEvent


def test_events_are_logged_recorded_and_progress_is_reported_once_at_the_end() -> None:
    logged: list[tuple[str, Mapping[str, object]]] = []
    recorded: list[MigrationEvent] = []
    progressed: list[Migration] = []

    def record(event: MigrationEvent) -> None:
        recorded.append(event)
        raise ValueError("a failing history stops nothing")

    dispatcher = MigrationEventDispatcher(EventLog(lambda name, fields: logged.append((name, fields))), record)
    migration = Migration("p", [], on_progress=progressed.append, metadata=MigrationMetadata("m", who="ada"))
    migration.fire(TransitionEvent.START)
    dispatcher.dispatch([MigrationEvent(migration, migration.transitions[-1])], migration)
    assert [(name, fields["migration_id"], fields["who"]) for name, fields in logged] == [
        ("migration_pushing", "m", "ada")
    ]
    assert progressed == [migration], "a running migration reports its progress at every tick"
    migration.fire(TransitionEvent.FAIL, "why")
    events = [MigrationEvent(migration, migration.transitions[-1]), MigrationEvent(migration, None)]
    dispatcher.dispatch(events, migration)
    assert (logged[-1][0], logged[-1][1]["reason"]) == ("migration_failed", "why")
    assert recorded[1:] == events
    assert progressed == [migration, migration]
    dispatcher.dispatch([], None)
    assert len(progressed) == 2
