"""How often ranks talk, what a step of several passes sends, and rows that travel in a narrower dtype."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from flexd.embedding.exchange.route import MAX_TABLE_ROWS, Dedup
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("dims", "dtypes", "training"),
    [
        ([8], ["float32"], [9, 1, 0]),
        ([8, 4, 2], ["float32"] * 3, [9, 1, 0]),
        ([8, 3], ["float32", "float64"], [9, 2, 0]),
        ([8, 3], ["float16", "bfloat16"], [10, 0, 0]),
        ([8, 3], ["float16", "float64"], [10, 1, 0]),
    ],
    ids=["one group", "three groups", "two dtypes", "two narrow dtypes", "one of each"],
)
def test_collectives_of_a_step(ranks: Ranks, dims: list[int], dtypes: list[str], training: list[int]) -> None:
    """Two hops: sizes, ids, rows, gradients on each; with copies sums down the first, and across the second an
    all-reduce, or sums from the homes where it would add what is rounded."""
    for moved, trained in ((False, [8, 0, 0]), (True, training)):
        for said in ranks(4).run("exchange_jobs:collectives", RankLayout(2, 2), dims, dtypes, moved):
            assert said == {"training": trained, "evaluation": [6, 0, 0]}


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_equal_passes_are_pushed_as_one(ranks: Ranks, nodes: int) -> None:
    layout = RankLayout(nodes, 4 // nodes)
    once, thrice, others = (ranks(4).run("exchange_jobs:pushed", layout, seeds) for seeds in ([1], [1] * 3, [1, 2, 3]))
    assert once == thrice
    assert sum(once) > 0
    assert sum(once) < sum(others) < 3 * sum(once)


@pytest.mark.parametrize("comm_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(1, 2), RankLayout(2, 1)], ids=str)
def test_a_narrow_wire_does_not_show_the_placement(ranks: Ranks, layout: RankLayout, comm_dtype: str) -> None:
    pool = ranks(layout.world_size)
    still, moved, exact = (
        pool.run("exchange_jobs:train", layout, *arguments)
        for arguments in ((False, comm_dtype), (True, comm_dtype), (False, None))
    )
    for a, b, c in zip(still, moved, exact, strict=True):
        assert b["equal"], "a replica differed from its home copy"
        np.testing.assert_allclose(a["losses"], b["losses"], rtol=0, atol=1e-4)
        for ours, theirs, wide in zip(a["tables"], b["tables"], c["tables"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
            assert 1e-5 < np.abs(ours - wide).max() < 0.2, "rounded, and not lost"
        assert a["bytes"] < 0.7 * c["bytes"]


@pytest.mark.parametrize(("dtype", "comm_dtype"), [("float32", "float16"), ("float32", "bfloat16"), ("float16", None)])
@pytest.mark.parametrize(("nodes", "local_ranks"), [(2, 2), (2, 3), (3, 2), (1, 4), (4, 1)])
def test_gradients_are_added_in_the_same_order_at_every_tier(
    ranks: Ranks, nodes: int, local_ranks: int, dtype: str, comm_dtype: str | None
) -> None:
    """Bit by bit, on a wire that is narrower than the sums."""
    layout = RankLayout(nodes, local_ranks)
    pool = ranks(layout.world_size)
    home, *others = (
        pool.run("exchange_jobs:summed_gradients", layout, tier, dtype, comm_dtype) for tier in (0, 1, 2, None)
    )
    sums = home[0][0]
    assert np.unique(sums).size > 100
    for results in (home, *others):
        for table, equal in results:
            assert equal, "a replica differed from its home copy"
            np.testing.assert_array_equal(table, sums)


def test_rows_are_rounded_where_they_are_read() -> None:
    """On one rank nothing travels; the same is learned all the same."""
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 9, 3)], comm_dtype="bfloat16")
    out = collection({"item": flexd.Jagged(torch.arange(9), torch.tensor([9]))})["item"].values
    assert torch.equal(out, collection.initial_table("item").bfloat16().float())
    assert not torch.equal(out, collection.gather_table("item"))
    with pytest.raises(EmbeddingError, match="'int8'"):
        flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 9, 3)], comm_dtype="int8")


@settings(max_examples=60, deadline=None)
@given(keys=st.lists(st.integers(5, 44), max_size=60), table=st.booleans())
def test_distinct_keys(keys: list[int], table: bool) -> None:
    rows = 40 if table else MAX_TABLE_ROWS + 1
    finder = Dedup(5, rows, torch.device("cpu"))
    assert (finder.nbytes > 0) == table
    for given_keys in (keys, keys[::-1]):
        wanted = torch.tensor(given_keys, dtype=torch.int64)
        distinct, places = finder.unique(wanted)
        assert sorted(distinct.tolist()) == sorted(set(given_keys))
        if places is None:
            assert distinct.tolist() == given_keys
        else:
            assert torch.equal(distinct[places], wanted)
