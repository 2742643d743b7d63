"""The flat key space: tables grouped by dim, dtype and optimizer, and back from keys to rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexd.core.errors import ConfigError
from flexd.core.keyspace import KeySpace, TableSpec, state_columns

SPECS = st.lists(
    st.tuples(st.integers(1, 50), st.sampled_from([2, 8]), st.sampled_from(["float32", "bfloat16"])),
    min_size=1,
    max_size=8,
).map(lambda shapes: [TableSpec(f"t{i}", rows, dim, dtype) for i, (rows, dim, dtype) in enumerate(shapes)])


@given(SPECS)
def test_every_key_names_one_row_of_one_table(specs: list[TableSpec]) -> None:
    keyspace = KeySpace(specs)
    keys = np.concatenate([keyspace.keys(table, np.arange(spec.rows)) for table, spec in enumerate(specs)])
    assert np.array_equal(np.sort(keys), np.arange(keyspace.total_rows))
    tables, rows = keyspace.table_rows(keys)
    assert tables.tolist() == [table for table, spec in enumerate(specs) for _ in range(spec.rows)]
    assert rows.tolist() == [row for spec in specs for row in range(spec.rows)]


@given(SPECS)
def test_groups_are_contiguous_and_in_the_order_of_their_first_tables(specs: list[TableSpec]) -> None:
    keyspace = KeySpace(specs)
    assert [group.first_key for group in keyspace.groups] == [
        0, *(group.end_key for group in keyspace.groups[:-1])
    ]  # fmt: skip
    assert [group.tables[0] for group in keyspace.groups] == sorted(group.tables[0] for group in keyspace.groups)
    for number, group in enumerate(keyspace.groups):
        assert {(specs[t].dim, specs[t].dtype) for t in group.tables} == {(group.dim, group.dtype)}
        assert (keyspace.group_of(np.arange(group.first_key, group.end_key)) == number).all()


def test_the_digest_names_the_list_of_tables() -> None:
    one = [TableSpec("a", 5, 4), TableSpec("b", 6, 4)]
    others = [one[::-1], [TableSpec("a", 6, 4), one[1]], [TableSpec("a", 5, 4, optimizer="adam"), one[1]]]
    digests = {KeySpace(specs).digest for specs in (one, *others)}
    assert len(digests) == 4
    assert KeySpace(list(one)).digest in digests


def test_bytes_of_a_row_and_its_state() -> None:
    assert TableSpec("a", 5, 16, "bfloat16", "adam").row_bytes == 32
    assert TableSpec("a", 5, 16, "bfloat16", "adam").state_bytes == 2 * 16 * 4
    assert TableSpec("a", 5, 16, "float64", "rowwise_adam").state_bytes == 17 * 8
    assert state_columns("rowwise_adam", 16) == {"exp_avg": 16, "exp_avg_sq": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1, 1), "no name"),
        (("a", 0, 1), "rows=0"),
        (("a", 1, 1, "int8"), "dtype 'int8'"),
        (("a", 1, 1, "float32", "lion"), "optimizer 'lion'"),
    ],
)
def test_invalid_tables_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TableSpec(*arguments)  # type: ignore[arg-type]


def test_lists_without_tables_and_with_equal_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tables"):
        KeySpace([])
    with pytest.raises(ConfigError, match="tables named twice: a"):
        KeySpace([TableSpec("a", 1, 1), TableSpec("a", 2, 1)])
