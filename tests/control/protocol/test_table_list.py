"""Lists of tables, and what differs between two."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import pytest

from flexd.control.protocol.table_list import table_differences, tables_body, tables_of_body
from flexd.core.errors import ControlError
from flexd.core.keyspace import TableSpec, digest_of

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
