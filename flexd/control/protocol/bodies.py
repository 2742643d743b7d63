"""Bodies of messages: lists of rows, and the tables of a trainer.

The body of a list of rows is int64[n] keys (little endian), then uint8[k n] tiers. It travels in pieces of
``PIECE_BYTES``: the first as the body of the message that announces the list, each further one with a message of its
own.

A digest shows that table lists differ, and not where. So a rank whose digest is not the daemon's sends its tables
before its hello. The daemon names the tables and fields that differ, or takes the tables over.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ConfigError, ControlError
from flexd.core.keyspace import TableSpec, digest_of
from flexd.core.placement import Delta

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
Bytes = bytes | memoryview

PIECE_BYTES = 2**20
"""Bytes of every piece of a list but the last."""
MAX_ROWS = 2**26
"""Rows in one chunk or listing: bounds the memory that a message makes its receiver allocate."""
MAX_TABLES_BYTES = 2**25
"""Bytes of a list of tables as JSON."""
MAX_DIFFERENCES = 8
"""Named in one refusal."""
_MAX_NAME_CHARACTERS = 200
_FIELDS = tuple(field.name for field in fields(TableSpec))


def rows_body(keys: Int64Array, tiers: UInt8Array) -> bytes:
    """Return int64[n] keys and uint8[m] tiers as they travel."""
    return keys.astype("<i8").tobytes() + tiers.astype(np.uint8).tobytes()


def delta_tiers(delta: Delta) -> UInt8Array:
    """Return uint8[2 n]: the old tiers, then the new tiers."""
    return np.concatenate([delta.old_tiers, delta.new_tiers])


def pieces_of(body: bytes) -> Sequence[Bytes]:
    """Cut a body into its pieces, at least one."""
    if len(body) <= PIECE_BYTES:
        return [body]
    view = memoryview(body)
    return [view[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)]


class RowsAssembly:
    """Collects the pieces of one announced list; allocates only what has arrived.

    Args:
        rows: number of rows.
        tiers_per_row: 2 for a chunk (old and new tier), 1 for a listing.

    Raises:
        ControlError: the announced number of rows is not possible.
    """

    def __init__(self, rows: int, tiers_per_row: int) -> None:
        if not 0 <= rows <= MAX_ROWS:
            raise ControlError(f"{rows} rows in one message", remedy=f"at most {MAX_ROWS}")
        self._rows = rows
        self._missing = rows * (8 + tiers_per_row)
        self._pieces: list[Bytes] = []

    def add(self, data: Bytes) -> bool:
        """Add the next piece; True if it was the last. Raises ControlError: it is not as long as it must be."""
        if len(data) != min(PIECE_BYTES, self._missing) or (self._pieces and not self._missing):
            raise ControlError(
                f"piece {len(self._pieces)} of a list of {self._rows} rows has {len(data)} bytes",
                remedy="run versions of flexd that work together",
            )
        self._pieces.append(data)
        self._missing -= len(data)
        return not self._missing

    def rows(self) -> tuple[Int64Array, UInt8Array]:
        """Return int64[rows] keys and uint8[tiers_per_row * rows] tiers of a complete list."""
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        keys = np.frombuffer(body, "<i8", self._rows).astype(np.int64)
        return keys, np.frombuffer(body, np.uint8, offset=8 * self._rows).copy()


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
