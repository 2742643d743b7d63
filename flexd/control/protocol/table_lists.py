"""Comparison of a trainer's tables with the daemon's, for the text of a refusal.

A digest shows that table lists differ, and not where. So a rank whose digest is not the daemon's sends its tables too,
as many as fit into ``MAX_LIST_BYTES``, and the daemon names the tables and fields that differ.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import fields

from flexd.core.errors import ConfigError, ControlError
from flexd.core.keyspace import TableSpec, digest_of

MAX_LIST_BYTES = 32 * 1024
"""Bytes of all entries of a list, as they travel: about 500 tables."""
MAX_TABLES_BYTES = 2**25
"""Bytes of a list of tables as JSON."""
MAX_DIFFERENCES = 8
"""Named in one refusal."""
_MAX_NAME_CHARACTERS = 200
_FIELDS = tuple(field.name for field in fields(TableSpec))


def table_entries(tables: Sequence[TableSpec]) -> tuple[str, ...]:
    """Encode the first tables, in order, that fit into ``MAX_LIST_BYTES``: JSON arrays of a table's fields."""
    entries: list[str] = []
    left = MAX_LIST_BYTES
    for table in tables:
        entry = json.dumps([getattr(table, name) for name in _FIELDS], separators=(",", ":"))
        left -= len(json.dumps(entry)) + 1
        if left < 0:
            break
        entries.append(entry)
    return tuple(entries)


def tables_body(tables: Sequence[TableSpec]) -> bytes:
    """Encode all tables of a job for a ``TableList``: compressed JSON, some 20 bytes a table."""
    values = [[getattr(table, name) for name in _FIELDS] for table in tables]
    return zlib.compress(json.dumps({"fields": _FIELDS, "tables": values}, separators=(",", ":")).encode())


def tables_of_body(body: bytes | memoryview, digest: str) -> tuple[TableSpec, ...]:
    """Decode ``tables_body``. Fields that this version does not know are ignored.

    Raises:
        ControlError: it cannot be read, is longer than ``MAX_TABLES_BYTES``, or the tables have another digest.
    """
    try:
        unpack = zlib.decompressobj()
        data = unpack.decompress(bytes(body), MAX_TABLES_BYTES)
        if unpack.unconsumed_tail or not unpack.eof:
            raise ValueError(f"more than {MAX_TABLES_BYTES} bytes, or cut")
        document = json.loads(data)
        names = document["fields"]
        tables = tuple(
            TableSpec(**{name: value for name, value in zip(names, values, strict=True) if name in _FIELDS})
            for values in document["tables"]
        )
        found = digest_of(tables)
    except (zlib.error, ValueError, TypeError, KeyError, RecursionError, ConfigError) as error:
        raise ControlError(f"a list of tables that cannot be read: {error}") from error
    if not tables or found != digest:
        raise ControlError(f"{len(tables)} tables of digest {found}, announced as {digest}")
    return tables


def tables_of_entries(entries: Sequence[str], table_count: int, digest: str) -> tuple[TableSpec, ...]:
    """Return the tables of ``table_entries`` if all of them are there; else none."""
    try:
        values = [each for each in map(_values, entries) if each is not None]
        tables = tuple(TableSpec(**dict(zip(_FIELDS, each, strict=True))) for each in values)  # type: ignore[arg-type]
    except (TypeError, ValueError, ConfigError):
        return ()
    return tables if tables and len(tables) == table_count and digest_of(tables) == digest else ()


def table_differences(entries: Sequence[str], table_count: int, daemon: Sequence[TableSpec]) -> str:
    """Name the differences between a trainer's tables and the daemon's; "" if none is found in ``entries``.

    Args:
        entries: from ``table_entries``. table_count: the trainer's tables, of which ``entries`` may be the first.
        daemon: the tables of the daemon's configuration.
    """
    trainer = [values for values in map(_values, entries) if values is not None]
    configured = {table.name: [getattr(table, name) for name in _FIELDS] for table in daemon}
    found: list[str] = []
    for values in trainer:
        name = str(values[0])
        known = configured.get(name)
        if known is None:
            found.append(f"table {_short(name)} is in the trainer, not in the daemon's configuration")
            continue
        found += [
            f"{_short(name)}.{field}: {_short(here)} in the trainer, {_short(there)} in the daemon's configuration"
            for field, here, there in zip(_FIELDS, values, known, strict=True)
            if here != there
        ]
    if trainer and len(trainer) == table_count:
        names = {values[0] for values in trainer}
        found += [
            f"table {_short(table.name)} is in the daemon's configuration, not in the trainer"
            for table in daemon
            if table.name not in names
        ]
    if not found:
        orders = zip((values[0] for values in trainer), (table.name for table in daemon), strict=False)
        found += [
            f"table number {number}: {_short(here)} in the trainer, {_short(there)} in the daemon's configuration"
            for number, (here, there) in enumerate(orders, start=1)
            if here != there
        ][:1]
    if not found and trainer and len(trainer) < table_count:
        found = [f"the first {len(trainer)} of the trainer's {table_count} tables are equal, a later one differs"]
    more = len(found) - MAX_DIFFERENCES
    return "; ".join(found[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _values(entry: str) -> list[str | int] | None:
    """Decode one entry; None if it is not one."""
    try:
        values = json.loads(entry)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, list) or len(values) != len(_FIELDS) or not isinstance(values[0], str):
        return None
    return values if all(isinstance(value, str | int) for value in values) else None


def _short(value: str | int) -> str:
    text = str(value)[:_MAX_NAME_CHARACTERS]
    return text if text.isprintable() else repr(text)
