"""The tables of a trainer as the body of a message, and their differences to those of the daemon.

A digest shows that table lists differ, and not where. So a rank whose digest is not the daemon's sends its tables
before its hello. The daemon names the tables and fields that differ, or takes the tables over.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import fields

from flexd.control.protocol.messages import Bytes
from flexd.core.errors import ConfigError, ControlError
from flexd.core.keyspace import TableSpec, digest_of

MAX_TABLES_BYTES = 2**25
"""Bytes of a list of tables as JSON."""
MAX_DIFFERENCES = 8
"""Named in one refusal."""
_MAX_NAME_CHARACTERS = 200
_FIELDS = tuple(field.name for field in fields(TableSpec))


def tables_body(tables: Sequence[TableSpec]) -> bytes:
    """Encode all tables of a job for a ``TableList``: compressed JSON, some 20 bytes per table."""
    values = [[getattr(table, name) for name in _FIELDS] for table in tables]
    return zlib.compress(json.dumps({"fields": _FIELDS, "tables": values}, separators=(",", ":")).encode())


def tables_of_body(body: Bytes, digest: str) -> tuple[TableSpec, ...]:
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


def table_differences(trainer: Sequence[TableSpec], daemon: Sequence[TableSpec]) -> str:
    """Name the differences between a trainer's tables and those of the daemon's configuration; "" if there is none."""
    configured = {table.name: table for table in daemon}
    found: list[str] = []
    for table in trainer:
        known = configured.get(table.name)
        if known is None:
            found.append(f"table {_short(table.name)} is in the trainer, not in the daemon's configuration")
            continue
        found += [
            f"{_short(table.name)}.{field}: {_short(getattr(table, field))} in the trainer, "
            f"{_short(getattr(known, field))} in the daemon's configuration"
            for field in _FIELDS
            if getattr(table, field) != getattr(known, field)
        ]
    names = {table.name for table in trainer}
    found += [
        f"table {_short(table.name)} is in the daemon's configuration, not in the trainer"
        for table in daemon
        if table.name not in names
    ]
    if not found:
        found += [
            f"table number {number}: {_short(here.name)} in the trainer, {_short(there.name)} in the daemon's "
            "configuration"
            for number, (here, there) in enumerate(zip(trainer, daemon, strict=False), start=1)
            if here.name != there.name
        ][:1]
    more = len(found) - MAX_DIFFERENCES
    return "; ".join(found[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _short(value: str | int) -> str:
    text = str(value)[:_MAX_NAME_CHARACTERS]
    return text if text.isprintable() else repr(text)
