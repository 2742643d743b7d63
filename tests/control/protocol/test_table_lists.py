"""Differences between the tables of trainer and daemon."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import pytest

from flexd.control.protocol.messages import MAX_MESSAGE_BYTES, Hello, encode
from flexd.control.protocol.table_lists import (
    MAX_DIFFERENCES,
    MAX_LIST_BYTES,
    table_differences,
    table_entries,
    tables_body,
    tables_of_body,
    tables_of_entries,
)
from flexd.core.errors import ControlError
from flexd.core.keyspace import TableSpec, digest_of

DAEMON = (TableSpec("items", 2_000, 8), TableSpec("users", 500, 16, "float16", "adam"), TableSpec("tags", 70, 8))


def differences(*trainer: TableSpec) -> str:
    return table_differences(table_entries(trainer), len(trainer), DAEMON)


@pytest.mark.parametrize(
    ("field", "value", "configured"),
    [
        ("rows", 501, 500),
        ("dim", 8, 16),
        ("dtype", "float32", "float16"),
        ("optimizer", "sgd", "adam"),
        ("homes", "node:1", "all"),
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


def test_the_number_of_named_differences_is_bounded() -> None:
    trainer = [TableSpec(f"t{number}", 1, 4) for number in range(MAX_DIFFERENCES + 1)]
    text = table_differences(table_entries(trainer), len(trainer), trainer[:1])
    assert text.count("not in the daemon's configuration") == MAX_DIFFERENCES
    text = table_differences(table_entries(trainer), len(trainer), ())
    assert text.endswith("table t7 is in the trainer, not in the daemon's configuration; and 1 more")


def test_a_list_of_many_tables_with_long_names_fits_into_a_hello() -> None:
    tables = [TableSpec(f"{'ä' * 40}\n{number}", 10**9, 64) for number in range(5_000)]
    entries = table_entries(tables)
    assert 50 < len(entries) < len(tables)
    assert MAX_LIST_BYTES * 0.9 < len(json.dumps(entries)) <= MAX_LIST_BYTES + 2 * len(entries)
    hello = Hello("job", "i", "a", 0, 1, 1, 1, (1,) * 1_000, "d", "s", "n", 1, 0, 0, entries, len(tables))
    assert len(encode(hello)) < MAX_MESSAGE_BYTES


def test_a_shortened_list_is_compared_up_to_its_end() -> None:
    items, users, _ = DAEMON
    entries = table_entries((items, users))
    assert table_differences(entries, 4, DAEMON) == (
        "the first 2 of the trainer's 4 tables are equal, a later one differs"
    )
    changed = table_entries((replace(items, rows=3), users))
    assert table_differences(changed, 3, DAEMON) == "items.rows: 3 in the trainer, 2000 in the daemon's configuration"


@pytest.mark.parametrize(
    "entry", ["", "{}", "[]", "[1]", '["a",[1],2,"x","y"]', '[1,2,3,"x","y"]', "[" * 5_000, '["a",1,2,"x"]']
)
def test_a_malformed_entry_is_ignored(entry: str) -> None:
    assert table_differences((entry, *table_entries(DAEMON)), 4, DAEMON) == (
        "the first 3 of the trainer's 4 tables are equal, a later one differs"
    )


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


def test_entries_of_a_hello_are_all_tables_or_none() -> None:
    few = [TableSpec("a", 3, 2), TableSpec("b", 4, 2, "float16", "adam")]
    assert tables_of_entries(table_entries(few), 2, digest_of(few)) == tuple(few)
    assert tables_of_entries(table_entries(few)[:1], 2, digest_of(few)) == ()
    assert tables_of_entries(("[]",), 1, digest_of(few)) == ()
