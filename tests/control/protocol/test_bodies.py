"""Pieces and sizes of lists of rows, and lists of tables."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.protocol import bodies as module
from flexd.control.protocol.bodies import (
    MAX_ROWS,
    RowsAssembly,
    pieces_of,
    rows_body,
    table_differences,
    tables_body,
    tables_of_body,
)
from flexd.core.errors import ControlError
from flexd.core.keyspace import TableSpec, digest_of


def test_rows_travel_as_little_endian_keys_then_tiers() -> None:
    keys, tiers = np.array([1, 258], np.int64), np.array([0, 2], np.uint8)
    wire = b"\x01" + bytes(7) + b"\x02\x01" + bytes(6) + b"\x00\x02"
    assert rows_body(keys, tiers) == wire


@settings(deadline=None)
@given(rows=st.integers(0, 40), per_row=st.integers(1, 2), piece_bytes=st.integers(1, 64), seed=st.integers(0, 99))
def test_any_list_arrives_as_it_was_cut(rows: int, per_row: int, piece_bytes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys, tiers = rng.integers(0, 2**62, rows), rng.integers(0, 3, per_row * rows).astype(np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece_bytes)
        body = rows_body(keys, tiers)
        pieces = pieces_of(body)
        assert all(len(piece) <= piece_bytes for piece in pieces)
        assembly = RowsAssembly(rows, per_row)
        assert [assembly.add(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    received_keys, received_tiers = assembly.rows()
    assert np.array_equal(received_keys, keys)
    assert np.array_equal(received_tiers, tiers)
    assert received_keys.flags.writeable and received_tiers.flags.writeable  # noqa: PT018


@pytest.mark.parametrize("rows", [-1, MAX_ROWS + 1])
def test_no_memory_is_allocated_for_a_message_of_too_many_rows(rows: int) -> None:
    with pytest.raises(ControlError, match="rows in one message"):
        RowsAssembly(rows, 2)


@pytest.mark.parametrize("data", [b"", b"x" * 9, b"x" * 11])
def test_a_piece_of_another_length_is_refused(data: bytes) -> None:
    with pytest.raises(ControlError, match="piece 0 of a list of 1 rows"):
        RowsAssembly(1, 2).add(data)


def test_a_piece_after_the_last_is_refused() -> None:
    assembly = RowsAssembly(1, 2)
    assert assembly.add(bytes(10))
    for more in (b"", b"x"):
        with pytest.raises(ControlError, match="piece 1"):
            assembly.add(more)


DAEMON = (TableSpec("items", 2_000, 8), TableSpec("users", 500, 16, "float16", "adam"), TableSpec("tags", 70, 8))


def differences(*trainer: TableSpec) -> str:
    return table_differences(trainer, DAEMON)


@pytest.mark.parametrize(
    ("field", "value", "configured"),
    [
        ("rows", 501, 500),
        ("dim", 8, 16),
        ("dtype", "float32", "float16"),
        ("optimizer", "sgd", "adam"),
        ("sharding", "table_row_wise:1", "row_wise"),
    ],
)
def test_a_differing_field_is_named_with_both_values(field: str, value: object, configured: object) -> None:
    items, users, tags = DAEMON
    changed = replace(users, **{field: value})  # type: ignore[arg-type]
    assert differences(items, changed, tags) == (
        f"users.{field}: {value} in the trainer, {configured} in the daemon's configuration"
    )


def test_tables_of_one_side_only_are_named() -> None:
    items, users, tags = DAEMON
    assert differences(items, users) == "table tags is in the daemon's configuration, not in the trainer"
    assert differences(items, users, tags, TableSpec("shops", 9, 4)) == (
        "table shops is in the trainer, not in the daemon's configuration"
    )


def test_another_order_is_named() -> None:
    items, users, tags = DAEMON
    assert differences(items, tags, users) == "table number 2: tags in the trainer, users in the daemon's configuration"


def test_a_list_of_all_tables_travels_whole() -> None:
    tables = tuple(TableSpec(f"table-{number}", 10 + number, 8) for number in range(3000))
    body = tables_body(tables)
    assert len(body) < 2**20, "one frame"
    assert tables_of_body(body, digest_of(tables)) == tables
    with pytest.raises(ControlError, match="announced as wrong"):
        tables_of_body(body, "wrong")
    for broken in (
        b"",
        body[:-9],
        b"no zlib",
        zlib.compress(b"[]"),
        zlib.compress(b'{"fields": ["name"], "tables": [[1, 2]]}'),
    ):
        with pytest.raises(ControlError, match="cannot be read"):
            tables_of_body(broken, digest_of(tables))
    # A later version may know more of a table.
    later = {"fields": ["name", "rows", "dim", "colour"], "tables": [["a", 3, 2, "red"]]}
    assert tables_of_body(zlib.compress(json.dumps(later).encode()), digest_of([TableSpec("a", 3, 2)]))[0].rows == 3
