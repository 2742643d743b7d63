"""Rows of a station are numbered in the order in which they are held and sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.embedding import devices
from flexd.embedding.exchange.collectives import Peers, Traffic
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.station_lookup import StationLookup
from flexd.embedding.store.store import GroupStore, make_stores

LAYOUT, RANK = RankLayout(1, 3), 1
GROUPS = KeySpace([TableSpec(f"t{dim}", 40, dim, "float32", "sgd") for dim in (4, 8, 16)]).groups


def stores_of(groups: int, listed: list[int]) -> list[GroupStore]:
    """Return the stores of a rank that lists keys: even ones at NODE, odd ones at DEVICE, in slot key + 100."""
    stores = make_stores(GROUPS[:groups], LAYOUT, RANK, [0] * groups, torch.device("cpu"))
    keys = np.array(listed, dtype=np.int64)
    tiers = np.where(keys % 2, Tier.DEVICE, Tier.NODE).astype(np.uint8)
    stores[0].directory.change(np.empty(0, np.int64), keys, (keys + 100).astype(np.int32), tiers)
    return stores


@settings(max_examples=60, deadline=None)
@given(groups=st.integers(1, 3), seed=st.integers(0, 1000), dedup=st.booleans(), last=st.booleans())
def test_every_request_finds_its_row(groups: int, seed: int, dedup: bool, last: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    end = GROUPS[groups - 1].end_key
    listed = [key for key in range(end) if torch.rand(1, generator=generator) < 0.2]
    lookup = StationLookup(stores_of(groups, listed), dedup=dedup)
    peers = Peers(None, range(3), RANK, LAYOUT, Traffic())
    hop = None if last else Hop(peers, lambda homes: homes)
    ids = torch.randint(0, end, (int(torch.randint(0, 60, (1,), generator=generator)),), generator=generator)
    if last:
        ids = ids[(ids % 3 == RANK) | torch.isin(ids, torch.tensor(listed, dtype=torch.int64))]
    ids, numbers = lookup.by_group(ids)
    located = lookup.locate(ids, None, hop)
    sizes = located.sections.numpy()
    stations = lookup.stations(located, sizes, 1 if last else 3, numbers)
    keys = lookup.numbered_keys(located, stations)
    away = lookup.split_sections(sizes, 1 if last else 3).away
    for group, rows, of_group, requests, sent in zip(
        GROUPS, stations, keys, torch.split(ids, numbers), away, strict=False
    ):
        assert torch.equal(of_group if rows.expand is None else of_group[rows.expand], requests)
        assert rows.rows == len(of_group)
        assert not dedup or len(of_group.unique()) == len(of_group)
        held, forwarded = of_group[: rows.held], of_group[rows.held :]
        plain, copies = held[: rows.plain], held[rows.plain :]
        assert torch.equal(rows.slots[rows.plain :], copies + 100)
        assert torch.equal(rows.slots[: rows.plain], (plain - group.first_key - (RANK - group.first_key) % 3) // 3)
        assert (rows.entries[: rows.plain] == lookup.listed.entries).all()
        assert (rows.entries[rows.plain :] < lookup.listed.entries).all()
        assert [int((forwarded % 3 == peer).sum()) for peer in range(3)] == ([0, 0, 0] if last else sent.tolist())
        assert torch.equal(forwarded % 3, (forwarded % 3).sort().values)
    assert int(located.held_accesses.sum()) == sum(int(key) % 3 == RANK or int(key) in listed for key in ids)


@pytest.mark.parametrize("dtypes", [[torch.float32] * 2, [torch.float32, torch.float64]])
def test_zeros_of_several_shapes_share_no_number(dtypes: list[torch.dtype]) -> None:
    first, second, none = devices.zeros([(3, 5), (2, 7), (0, 4)], [*dtypes, torch.float32], torch.device("cpu"))
    first += 1
    assert (first.shape, second.shape, none.shape) == ((3, 5), (2, 7), (0, 4))
    assert (first.dtype, second.dtype) == tuple(dtypes)
    assert int(second.count_nonzero()) == 0
