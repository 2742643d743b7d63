"""The directory compared with a dict, its memory, and both ways of merging."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.layout import RankLayout, Tier
from flexd.embedding.store import directory as module
from flexd.embedding.store.directory import Directory, HomeOrder

CPU = torch.device("cpu")
FIRST = 7
LAYOUT = RankLayout(2, 2)
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


def order_of(rows: int, first: int = FIRST, layout: RankLayout = LAYOUT) -> HomeOrder:
    return HomeOrder(first, rows, layout, layout.local_ranks - 1)


def directory_of(rows: dict[int, tuple[int, int]], order: HomeOrder) -> Directory:
    return Directory.empty(order, CPU).replace(torch.empty(0, dtype=torch.int64), *columns(rows))


def as_dict(directory: Directory) -> dict[int, tuple[int, int]]:
    keys = directory.keys.tolist()
    layout = directory.order.layout

    def place(key: int) -> tuple[int, int, int]:
        home = key % layout.world_size
        return layout.local_rank_of(home), layout.node_of(home), key

    assert keys == sorted(set(keys), key=place)
    homes = [layout.rank_of(node, local) for local in range(layout.local_ranks) for node in range(layout.nodes)]
    for at, home in enumerate(homes):
        first, end = directory.bounds[at : at + 2]
        assert keys[first:end] == [key for key in keys if key % layout.world_size == home]
    everywhere = torch.arange(len(directory))
    assert directory.tiers.tolist() == directory.tiers_at(everywhere).tolist()
    assert directory.slots_at(everywhere).dtype == torch.int64
    return dict(
        zip(keys, zip(directory.slots_at(everywhere).tolist(), directory.tiers.tolist(), strict=True), strict=True)
    )


def on_cpu(directory: Directory, removed: torch.Tensor, new: Columns) -> Directory:
    return directory.replace(removed, *new)


def on_other_devices(directory: Directory, removed: torch.Tensor, new: Columns) -> Directory:
    """Merge as on other devices than the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_merged_on_cpu", module._merged)
        return directory.replace(removed, *new)


@pytest.mark.parametrize("replace", [on_cpu, on_other_devices])
@pytest.mark.parametrize("group_rows", [41, 2**31 + 8])
@pytest.mark.parametrize("layout", [RankLayout(1, 1), LAYOUT, RankLayout(3, 2), RankLayout(1, 4)], ids=str)
@settings(max_examples=40, deadline=None)
@given(before=entries, after=entries, dropped=st.sets(ids), queried=st.lists(ids, max_size=30))
def test_a_directory_equals_a_dict(
    replace: Callable[[Directory, torch.Tensor, Columns], Directory],
    group_rows: int,
    layout: RankLayout,
    before: dict[int, tuple[int, int]],
    after: dict[int, tuple[int, int]],
    dropped: set[int],
    queried: list[int],
) -> None:
    directory = directory_of(before, order_of(group_rows, layout=layout))
    removed, found = directory.find(torch.tensor(sorted((dropped | set(after)) & set(before)), dtype=torch.int64))
    assert bool(found.all())
    replaced = replace(directory, removed, columns(after))
    expected = {key: value for key, value in before.items() if key not in dropped} | after
    assert as_dict(replaced) == expected
    assert as_dict(directory) == before, "a directory is never changed"
    assert replaced.codes.dtype == (torch.int32 if group_rows == 41 else torch.int64)
    keys = replaced.keys.tolist()
    for tier in (Tier.NODE, Tier.DEVICE):
        assert replaced.keys[replaced.at_tier(tier)].tolist() == [key for key in keys if expected[key][1] == tier]
    on_rail = [key for key in keys if key % layout.local_ranks == layout.local_ranks - 1]
    assert keys[slice(*replaced.rail)] == on_rail
    device = [key for key in on_rail if expected[key][1] == Tier.DEVICE]
    if replaced.rail_device is None:
        assert device == on_rail
    else:
        assert replaced.keys[replaced.rail_device].tolist() == device != on_rail
    at, found = replaced.find(torch.tensor(queried, dtype=torch.int64))
    assert found.tolist() == [key in expected for key in queried]
    assert [replaced.keys[p].item() for p in at[found]] == [key for key in queried if key in expected]


def test_an_empty_directory_finds_nothing() -> None:
    at, found = Directory.empty(order_of(10), CPU).find(torch.tensor([0, 5]))
    assert at.shape == found.shape == (2,)
    assert not found.any()


@pytest.mark.parametrize(("first", "rows"), [(2**40, 2**31 - 4), (2**40, 2**31), (2**40 + 3, 2**33)])
def test_the_last_rows_of_large_groups(first: int, rows: int) -> None:
    """Codes of 32 bits are used up to their largest value."""
    order = order_of(rows, first)
    keys = torch.tensor([first, first + rows - 3, first + rows - 2, first + rows - 1])
    assert order.keys(order.codes(keys)).tolist() == keys.tolist()
    directory = Directory.empty(order, CPU).replace(
        torch.empty(0, dtype=torch.int64), keys, torch.tensor([2**31 - 1, 0, 5, 7], dtype=torch.int32),
        torch.tensor([2, 2, 1, 1], dtype=torch.uint8),
    )  # fmt: skip
    assert directory.bounds[-1] == 4
    at, found = directory.find(torch.cat([keys, keys[1:2] - 1]))
    assert directory.keys[at[:4]].tolist() == keys.tolist()
    assert found.tolist() == [True, True, True, True, False]
    assert directory.slots_at(at[:4]).tolist() == [2**31 - 1, 0, 5, 7]


def test_positions_do_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = torch.from_numpy(np.random.default_rng(0).random(1000) < 0.4)
    for block in (1, 7, 1000, 4096):
        monkeypatch.setattr(module, "_POSITION_BLOCK", block)
        assert torch.equal(module._positions(chosen, 5), chosen.nonzero().view(-1) + 5)


def test_a_directory_has_8_to_12_bytes_a_row_and_merging_a_chunk_needs_little_more() -> None:
    """The formula is linear, so a million rows are enough."""
    rows = 1_000_000
    rng = np.random.default_rng(1)
    keys = np.flatnonzero(rng.random(10 * rows) < 0.1)[: rows - 20_000]
    tiers = torch.from_numpy(rng.integers(1, 3, len(keys)).astype(np.uint8))
    directory = Directory.empty(order_of(10 * rows, 0), CPU).replace(
        torch.empty(0, dtype=torch.int64), torch.from_numpy(keys), torch.arange(len(keys), dtype=torch.int32), tiers
    )
    first, end = directory.rail
    device_rows = int((directory.tiers[first:end] == Tier.DEVICE).sum())
    assert directory.nbytes == 8 * len(directory) + 4 * device_rows
    all_device = Directory.empty(directory.order, CPU).replace(
        torch.empty(0, dtype=torch.int64), torch.from_numpy(keys), torch.arange(len(keys), dtype=torch.int32),
        torch.full_like(tiers, Tier.DEVICE),
    )  # fmt: skip
    assert all_device.nbytes == 8 * len(all_device)
    chunk = np.setdiff1d(rng.integers(0, 10 * rows, 1000), keys)
    removed = torch.arange(0, len(keys), 1000)
    new = (torch.from_numpy(chunk), torch.arange(len(chunk), dtype=torch.int32), torch.ones(len(chunk)).to(torch.uint8))
    tracemalloc.start()
    try:
        replaced = directory.replace(removed, *new)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 18 * len(replaced) + 16 * module._POSITION_BLOCK, "beside the 8 to 12 bytes a row of the old one"
