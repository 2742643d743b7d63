"""Tables beside the format of the history's file: at most one record of a kind for each migration.

They are not part of the format: an older file gains them when it is opened, and an older daemon ignores them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from typing import Any, Generic, TypeVar

from flexd.operations.history.records import EffectRecord, VerdictRecord

Record = TypeVar("Record", bound=EffectRecord | VerdictRecord)
_TYPES = {
    "int": "INTEGER NOT NULL",
    "float": "REAL NOT NULL",
    "bool": "INTEGER NOT NULL",
    "str": "TEXT NOT NULL",
    "float | None": "REAL",
}


class SideTable(Generic[Record]):
    """Reads and writes the records of one kind; rows end with their migration.

    Args:
        name: of the table.
        kind: its records; their first field is the id of the migration, for which its serial stands.
    """

    def __init__(self, name: str, kind: type[Record]) -> None:
        self.name = name
        self._kind = kind
        own = fields(kind)[1:]
        self.columns = ("serial", *(field.name for field in own))
        self._flags = tuple(field.name for field in own if field.type == "bool")
        self._names = ", ".join(f'"{name}"' for name in self.columns[1:])
        self._qualified = ", ".join(f'{name}."{column}"' for column in self.columns[1:])
        definition = ", ".join(f'"{field.name}" {_TYPES[str(field.type)]}' for field in own)
        self.create = (
            f"CREATE TABLE IF NOT EXISTS {name} "
            f"(serial INTEGER PRIMARY KEY REFERENCES migrations ON DELETE CASCADE, {definition})"
        )
        # Of a migration that is not kept any more nothing is written.
        self._set = (
            f"INSERT OR REPLACE INTO {name} (serial, {self._names}) "
            f"SELECT serial, {', '.join('?' * len(own))} FROM migrations WHERE migration_id = ?"
        )

    def write(self, connection: sqlite3.Connection, record: Record) -> None:
        """Write a record; it replaces an earlier one of its migration."""
        migration_id, *values = astuple(record)
        connection.execute(self._set, (*values, migration_id))

    def of_migrations(self, connection: sqlite3.Connection, migration_ids: Sequence[str]) -> dict[str, Record]:
        """Return the records of these migrations by id; none from a file without the table."""
        if not self._exists(connection):
            return {}
        return {
            record.migration_id: record
            for migration_id in migration_ids
            for record in self._select(connection, "WHERE migration_id = ?", migration_id)
        }

    def newest(self, connection: sqlite3.Connection) -> Record | None:
        """Return the record of the newest migration that has one."""
        if not self._exists(connection):
            return None
        return next(self._select(connection, "ORDER BY serial DESC LIMIT 1"), None)

    def _exists(self, connection: sqlite3.Connection) -> bool:
        return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (self.name,)).fetchall())

    def _select(self, connection: sqlite3.Connection, clause: str, *values: str) -> Iterator[Record]:
        rows = connection.execute(
            f"SELECT migration_id, {self._qualified} FROM {self.name} JOIN migrations USING (serial) {clause}", values
        ).fetchall()
        for row in rows:
            found: dict[str, Any] = dict(zip(("migration_id", *self.columns[1:]), row, strict=True))
            yield self._kind(**found | {name: bool(found[name]) for name in self._flags})


EFFECTS = SideTable("effects", EffectRecord)
VERDICTS = SideTable("verdicts", VerdictRecord)
