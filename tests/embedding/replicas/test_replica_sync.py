"""Gradients on a wire that is narrower than their sums: training does not depend on the placement."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from tests.support import accelerator_jobs, exchange_jobs
from tests.support.rank_pool import Job, RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("comm_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(1, 2), RankLayout(2, 1)], ids=str)
def test_training_on_a_narrow_wire_does_not_depend_on_the_placement(
    ranks: Ranks, layout: RankLayout, comm_dtype: str
) -> None:
    pool = ranks(layout.world_size)
    still, moved, exact = (
        pool.run(exchange_jobs.train, layout, *arguments)
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
    """Compare bits, on a wire that is narrower than the sums."""
    layout = RankLayout(nodes, local_ranks)
    pool = ranks(layout.world_size)
    home, *others = (
        pool.run(exchange_jobs.summed_gradients, layout, tier, dtype, comm_dtype) for tier in (0, 1, 2, None)
    )
    sums = home[0][0]
    assert np.unique(sums).size > 100
    for results in (home, *others):
        for table, equal in results:
            assert equal, "a replica differed from its home copy"
            np.testing.assert_array_equal(table, sums)


@pytest.mark.parametrize("kernels", [accelerator_jobs.run, accelerator_jobs.run_in_units])
def test_messages_of_an_accelerator_round_in_the_same_places_at_every_tier(ranks: Ranks, kernels: Job) -> None:
    """Gradients that a rank sends to itself on their way are rounded nowhere, as those of host memory."""
    layout = RankLayout(2, 2)
    pool = ranks(4)
    home = pool.run(exchange_jobs.summed_gradients, layout, 0, "float32", "float16")
    for tier in (0, 1, 2, None):
        job = (exchange_jobs.summed_gradients, layout, tier, "float32", "float16")
        for table, equal in pool.run(kernels, *job):
            assert equal, "a replica differed from its home copy"
            np.testing.assert_array_equal(table, home[0][0])
