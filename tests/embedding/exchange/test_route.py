"""Routes: distinct keys, and several passes merged into one."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding import devices
from flexd.embedding.exchange.route import MAX_TABLE_ROWS, Dedup


@settings(max_examples=60, deadline=None)
@given(keys=st.lists(st.integers(5, 44), max_size=60), table=st.booleans())
def test_distinct_keys(keys: list[int], table: bool) -> None:
    finder = Dedup(5, 40 if table else MAX_TABLE_ROWS + 1, torch.device("cpu"), devices.Numbers(torch.device("cpu")))
    for given_keys in (keys, keys[::-1]):
        ids = torch.tensor(given_keys, dtype=torch.int64)
        distinct, places = finder.unique(ids)
        assert sorted(distinct.tolist()) == sorted(set(given_keys))
        if places is None:
            assert distinct.tolist() == given_keys
        else:
            assert torch.equal(distinct[places], ids)
