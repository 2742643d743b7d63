"""The directory against a dict, what it costs, and both ways of merging."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding import directory as module
from flexd.embedding.directory import Directory
from flexd.layout import Tier

CPU = torch.device("cpu")
FIRST = 7
ids = st.integers(FIRST, FIRST + 40)
entries = st.dictionaries(ids, st.tuples(st.integers(0, 99), st.integers(1, 2)), max_size=25)
Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def columns(rows: dict[int, tuple[int, int]]) -> Columns:
    keys = sorted(rows)
    return (
        torch.tensor(keys, dtype=torch.int64),
        torch.tensor([rows[key][0] for key in keys], dtype=torch.int32),
        torch.tensor([rows[key][1] for key in keys], dtype=torch.uint8),
    )


def directory_of(rows: dict[int, tuple[int, int]], group_rows: int = 41) -> Directory:
    return Directory.empty(FIRST, group_rows, CPU).replace(torch.empty(0, dtype=torch.int64), *columns(rows))


def as_dict(directory: Directory) -> dict[int, tuple[int, int]]:
    keys = directory.keys.tolist()
    assert keys == sorted(set(keys))
    everywhere = torch.arange(len(directory))
    assert directory.tiers.tolist() == directory.tiers_at(everywhere).tolist()
    assert directory.slots_at(everywhere).dtype == torch.int64
    return dict(
        zip(keys, zip(directory.slots_at(everywhere).tolist(), directory.tiers.tolist(), strict=True), strict=True)
    )


def on_cpu(directory: Directory, removed: torch.Tensor, new: Columns) -> Directory:
    return directory.replace(removed, *new)


def as_elsewhere(directory: Directory, removed: torch.Tensor, new: Columns) -> Directory:
    """The way of other devices, on this one."""
    keys, slots, tiers = new
    places = torch.where(tiers == Tier.DEVICE, -1 - slots, slots)
    return directory._replaced(removed, (keys - FIRST).to(directory.offsets.dtype), places)


@pytest.mark.parametrize("replace", [on_cpu, as_elsewhere])
@pytest.mark.parametrize("group_rows", [41, 2**31 + 1])
@settings(max_examples=100, deadline=None)
@given(before=entries, after=entries, gone=st.sets(ids), asked=st.lists(st.integers(4, 52), max_size=30))
def test_directory_is_a_dict(
    replace: Callable[[Directory, torch.Tensor, Columns], Directory],
    group_rows: int,
    before: dict[int, tuple[int, int]],
    after: dict[int, tuple[int, int]],
    gone: set[int],
    asked: list[int],
) -> None:
    directory = directory_of(before, group_rows)
    removed, found = directory.find(torch.tensor(sorted((gone | set(after)) & set(before)), dtype=torch.int64))
    assert bool(found.all())
    replaced = replace(directory, removed, columns(after))
    expected = {key: value for key, value in before.items() if key not in gone} | after
    assert as_dict(replaced) == expected
    assert as_dict(directory) == before, "a directory is never changed"
    assert replaced.offsets.dtype == (torch.int32 if group_rows == 41 else torch.int64)
    for tier in (Tier.NODE, Tier.DEVICE):
        there = [key for key in sorted(expected) if expected[key][1] == tier]
        assert replaced.keys[replaced.positions[tier]].tolist() == there
    at, found = replaced.find(torch.tensor(asked, dtype=torch.int64))
    assert found.tolist() == [key in expected for key in asked]
    assert [replaced.keys[p].item() for p in at[found]] == [key for key in asked if key in expected]


def test_an_empty_directory_finds_nothing() -> None:
    at, found = Directory.empty(0, 10, CPU).find(torch.tensor([0, 5]))
    assert at.shape == found.shape == (2,)
    assert not found.any()


@pytest.mark.parametrize(("first", "rows"), [(2**40, 2**31), (2**40, 2**33)])
def test_the_last_rows_of_large_groups(first: int, rows: int) -> None:
    """Offsets of 32 bits reach just as far as they are used."""
    keys = torch.tensor([first, first + rows - 2, first + rows - 1])
    directory = Directory.empty(first, rows, CPU).replace(
        torch.empty(0, dtype=torch.int64), keys, torch.tensor([2**31 - 1, 0, 5], dtype=torch.int32),
        torch.tensor([2, 2, 1], dtype=torch.uint8),
    )  # fmt: skip
    assert directory.keys.tolist() == keys.tolist()
    at, found = directory.find(torch.cat([keys, keys[1:2] - 1]))
    assert at[:3].tolist() == [0, 1, 2]
    assert found.tolist() == [True, True, True, False]
    assert directory.slots_at(at[:3]).tolist() == [2**31 - 1, 0, 5]


def test_positions_do_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    places = np.random.default_rng(0).integers(-5, 5, 1000).astype(np.int32)
    for block in (1, 7, 1000, 4096):
        monkeypatch.setattr(module, "_POSITION_BLOCK", block)
        for negative in (False, True):
            assert np.array_equal(
                module._positions(places, negative=negative), np.flatnonzero((places < 0) == negative)
            )


def test_twelve_bytes_a_hot_row_and_a_chunk_needs_little_more() -> None:
    """The formula is linear, so what holds for a million rows holds for ten."""
    rows = 1_000_000
    rng = np.random.default_rng(1)
    keys = np.flatnonzero(rng.random(10 * rows) < 0.1)[: rows - 20_000]
    tiers = torch.from_numpy(rng.integers(1, 3, len(keys)).astype(np.uint8))
    directory = Directory.empty(0, 10 * rows, CPU).replace(
        torch.empty(0, dtype=torch.int64), torch.from_numpy(keys), torch.arange(len(keys), dtype=torch.int32), tiers
    )
    assert directory.nbytes == 12 * len(directory)
    chunk = np.setdiff1d(rng.integers(0, 10 * rows, 1000), keys)
    removed = torch.arange(0, len(keys), 1000)
    new = (torch.from_numpy(chunk), torch.arange(len(chunk), dtype=torch.int32), torch.ones(len(chunk)).to(torch.uint8))
    tracemalloc.start()
    try:
        replaced = directory.replace(removed, *new)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 18 * len(replaced) + 16 * module._POSITION_BLOCK, "beside the 12 bytes a row of the old one"
