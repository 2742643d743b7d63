"""Routes: distinct keys, and several passes merged into one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexd
from flexd.embedding import devices
from flexd.embedding.exchange.station_lookup import MAX_TABLE_ROWS, Dedup


@settings(max_examples=60, deadline=None)
@given(keys=st.lists(st.integers(5, 44), max_size=60), table=st.booleans())
def test_distinct_keys(keys: list[int], table: bool) -> None:
    rows = 40 if table else MAX_TABLE_ROWS + 1
    finder = Dedup(5, rows, torch.device("cpu"), devices.Numbers(torch.device("cpu")))
    assert (finder.nbytes > 0) == table
    for given_keys in (keys, keys[::-1]):
        ids = torch.tensor(given_keys, dtype=torch.int64)
        distinct, places = finder.unique(ids)
        assert sorted(distinct.tolist()) == sorted(set(given_keys))
        if places is None:
            assert distinct.tolist() == given_keys
        else:
            assert torch.equal(distinct[places], ids)


@pytest.mark.parametrize("exchange", ["chain", "direct"])
def test_half_precision_passes_are_added_in_float32(exchange: str) -> None:
    """2048 + 1 is 2048 in float16. Rows of bags are distinct, so their gradients are float16."""
    collection = flexd.EmbeddingBagCollection(
        [flexd.EmbeddingBagTable("item", 9, 4, dtype="float16")], optimizer=flexd.SGD(2.0**-10), exchange=exchange
    )
    collection.load_rows("item", 0, torch.zeros(9, 4))
    for weight in (2048.0, 1.0, 1.0):
        bags = collection({"item": flexd.Jagged(torch.tensor([3, 5]), torch.tensor([2]))})["item"]
        assert bags.dtype == torch.float16
        (bags * weight).sum().backward()
    collection.optimizer.step()
    expected = torch.zeros(9, 4, dtype=torch.float16)
    expected[[3, 5]] = -2050.0 / 1024.0
    assert torch.equal(collection.gather_table("item"), expected)
