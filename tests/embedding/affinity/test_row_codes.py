"""Codes of rows: the node of the home and the dim-group survive, in few bytes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding.affinity.row_codes import RowCodes, SampleKeys


@given(
    seed=st.integers(0, 1000),
    nodes=st.integers(1, 9),
    groups=st.integers(1, 4),
    ids=st.sampled_from([0, 5, 3000, 10**6, 10**9]),
    total=st.sampled_from([10, 10**6, 10**12]),
)
@settings(max_examples=60, deadline=None)
def test_codes_keep_the_home_and_the_group_of_every_row(
    seed: int, nodes: int, groups: int, ids: int, total: int
) -> None:
    rng = np.random.default_rng(seed)
    codes = RowCodes.for_batch(nodes, groups, ids)
    keys, sample = torch.from_numpy(rng.integers(0, total, 50)), torch.from_numpy(rng.integers(0, 7, 50))
    cost = torch.from_numpy(rng.integers(0, 2**33, 8))
    mine = SampleKeys.of(keys, sample, cost, total)
    assert list(mine.counts) == [len(set(keys[sample == at].tolist())) for at in range(8)]
    group = mine.keys % groups
    message = codes.pack(mine, mine.keys % nodes, group)
    assert len(message) == codes.message_bytes(8, len(mine.keys))
    counts, ship, packed = codes.unpack(message, 8)
    np.testing.assert_array_equal(counts, mine.counts)
    np.testing.assert_array_equal(ship, np.minimum(mine.sample_bytes, 2**31 - 1))
    home, of_group = codes.home_and_group(packed)
    np.testing.assert_array_equal(home, mine.keys % nodes)
    np.testing.assert_array_equal(of_group, group)


def test_few_rows_of_a_batch_share_a_code() -> None:
    for ids in (1000, 8000, 200_000):
        codes = RowCodes.for_batch(2, 1, ids)
        keys = np.unique(np.random.default_rng(ids).integers(0, 10**9, ids))
        mine = SampleKeys(np.array([len(keys)]), keys, np.array([0]))
        packed = RowCodes(2, 1, codes.width).pack(mine, keys % 2, np.zeros_like(keys))[6:]
        distinct = np.unique(packed.reshape(-1, codes.width), axis=0)
        assert len(distinct) > 0.93 * len(keys)
    assert [RowCodes.for_batch(2, 1, ids).width for ids in (1000, 8000, 200_000, 10**7)] == [2, 2, 3, 4]


def test_rows_beyond_the_limit_of_a_sample_are_left_out() -> None:
    keys = torch.arange(70_000)
    mine = SampleKeys.of(keys, (keys >= 69_990).long(), torch.zeros(2, dtype=torch.int64), 70_000)
    assert list(mine.counts) == [65_535, 10]
    assert len(mine.keys) == 65_545
    assert mine.keys[-1] == 69_999
