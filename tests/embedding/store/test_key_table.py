"""Tables of keys compared with a dict; of buckets also growth, full ones, and values that stay with their keys."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding.store.key_table import (
    ABSENT,
    BUCKET_CELLS,
    BucketTable,
    DenseKeyTable,
    KeyTable,
    is_dense,
    key_table,
)

CPU = torch.device("cpu")


def as_dict(table: KeyTable) -> dict[int, int]:
    keys, values = table.items()
    assert len(keys) == len(table)
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


def insert(table: KeyTable, rows: dict[int, int]) -> None:
    table.insert(torch.tensor(list(rows), dtype=torch.int64), torch.tensor(list(rows.values()), dtype=torch.int32))


def lookup(table: KeyTable, keys: list[int]) -> list[int | None]:
    asked, absent = torch.tensor(keys, dtype=torch.int64), torch.tensor(ABSENT - 1, dtype=torch.int32)
    found, cells = table.find(asked)
    values = table.values_at(cells).tolist()
    expected = [value if known else int(absent) for known, value in zip(found.tolist(), values, strict=True)]
    for host in (True, False):
        with mock.patch("flexd.embedding.devices.in_host_memory", return_value=host):
            assert table.values_of(asked, absent).tolist() == expected
    return [value if known else None for known, value in zip(found.tolist(), values, strict=True)]


def cells_of(table: KeyTable, keys: torch.Tensor) -> torch.Tensor:
    found, cells = table.find(keys)
    assert bool(found.all())
    return cells


@pytest.mark.parametrize(("kind", "max_key"), [(DenseKeyTable, 60), (BucketTable, 60), (BucketTable, 2**40)])
@settings(max_examples=60, deadline=None)
@given(
    capacity=st.sampled_from([0, 5, 64]), first=st.sampled_from([0, -60]), data=st.data(), changes=st.integers(1, 8),
)  # fmt: skip
def test_a_table_equals_a_dict(
    kind: type[DenseKeyTable | BucketTable], max_key: int, capacity: int, first: int, data: st.DataObject, changes: int
) -> None:
    """Keys lie at either end of the range; the table grows where it was made for fewer."""
    first = max_key + first if first else 0
    ids = st.integers(first, first + 60)
    table, expected = kind(capacity, max_key, CPU), dict[int, int]()
    for _ in range(changes):
        removed = data.draw(st.sets(st.sampled_from(sorted(expected)))) if expected else set()
        table.remove(cells_of(table, torch.tensor(sorted(removed), dtype=torch.int64)))
        for key in removed:
            del expected[key]
        drawn = data.draw(st.dictionaries(ids, st.integers(-(2**31), ABSENT - 2), max_size=40))
        new = {key: value for key, value in drawn.items() if key not in expected}
        insert(table, new)
        expected |= new
        bound, low, high = data.draw(st.integers(-50, 50)), data.draw(st.integers(-3, 0)), data.draw(st.integers(0, 1))
        near = {key: value for key, value in expected.items() if abs(value) < 2**30}
        if len(near) == len(expected):
            table.shift_values(*(torch.tensor(each, dtype=torch.int32) for each in ([bound], [low, high])))
            expected = {key: value + (low if value < bound else high) for key, value in expected.items()}
        assert as_dict(table) == expected
        queried = data.draw(st.lists(ids, max_size=20))
        assert lookup(table, queried) == [expected.get(key) for key in queried]


@pytest.mark.parametrize(
    ("capacity", "max_key"),
    [(0, 500), (1, 2**20), (1, 2**20 - 1), (2**20, 2 * 2**20), (2**20, 2**30), (2**21, 6 * 2**20)],
)
def test_a_table_is_dense_where_it_is_small_or_no_larger_than_buckets(capacity: int, max_key: int) -> None:
    table = key_table(capacity, max_key, torch.device("meta"))
    dense = isinstance(table, DenseKeyTable)
    assert dense == is_dense(capacity, max_key) == (capacity > 0 and (max_key < 2**20 or 4 * max_key < 10 * capacity))
    assert dense or table.nbytes < 4 * max(max_key, 500)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999), rows=st.sampled_from([300, 3000]))
def test_a_table_filled_to_its_capacity_does_not_grow(seed: int, rows: int) -> None:
    keys = torch.randperm(20 * rows, generator=torch.Generator().manual_seed(seed))[:rows]
    table = BucketTable(rows, 20 * rows, CPU)
    before = table.nbytes
    values = torch.arange(rows, dtype=torch.int32)
    for part, of_part in zip(torch.split(keys, 150), torch.split(values, 150), strict=True):
        table.insert(part, of_part)
    assert table.nbytes == before
    assert before <= 10 * rows + 4 * 8 * BUCKET_CELLS + 8 * (37 + 4), "8 bytes a cell, four fifths of them in use"
    assert torch.equal(table.values_at(cells_of(table, keys)), values)


def test_keys_of_full_buckets_move_others_and_then_the_table_grows() -> None:
    """All keys share one of a few pairs of buckets, so that both of them are full long before the table is."""
    table = BucketTable(200, 10**6, CPU)
    candidates = torch.arange(10**6)
    first, second = table._buckets_of(candidates).unbind(1)
    assert bool((first != second).all())
    crowded = candidates[(first < 2) & (second < 16 + 6)][:80]
    assert len(crowded) == 80
    values = torch.arange(80, dtype=torch.int32)
    before = table.nbytes
    for at in range(80):
        table.insert(crowded[at : at + 1], values[at : at + 1])
        assert torch.equal(table.values_at(cells_of(table, crowded[: at + 1])), values[: at + 1])
    assert table.nbytes > before
    assert as_dict(table) == dict(zip(crowded.tolist(), values.tolist(), strict=True))
