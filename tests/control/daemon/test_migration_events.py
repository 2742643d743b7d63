"""Dispatch of migration events to the log and what observes migrations."""

from __future__ import annotations

from collections.abc import Mapping

from flexd.control.daemon.event_log import EventLog, MigrationEvent, dispatch
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.migration_record import MigrationRecord
from flexd.control.daemon.migration_states import TransitionEvent


def test_events_are_logged_and_passed_on() -> None:
    logged: list[tuple[str, Mapping[str, object]]] = []
    recorded: list[MigrationEvent] = []

    def record(event: MigrationEvent) -> None:
        recorded.append(event)
        raise ValueError("a failing history stops nothing")

    log = EventLog(lambda name, fields: logged.append((name, fields)))
    migration = Migration("p", [], origin=MigrationRecord(migration_id="m", requested_by="ada"))
    migration.fire(TransitionEvent.START)
    migration.fire(TransitionEvent.FAIL, "why")
    _, started, failed = migration.record.transitions
    events = [MigrationEvent(migration, started), MigrationEvent(migration, failed), MigrationEvent(migration, None)]
    dispatch(events, log, record)
    assert [(name, fields["migration_id"], fields["requested_by"], fields["reason"]) for name, fields in logged] == [
        ("migration_pushing", "m", "ada", ""), ("migration_failed", "m", "ada", "why"),
    ]  # fmt: skip
    assert recorded == events
