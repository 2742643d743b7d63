"""A table that is copied to every rank costs what its rows cost that chunks have listed at DEVICE: nothing is won by
the rule that a plan cannot reach in training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("exchange", ["chain", "direct"])
@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(1, 4), RankLayout(4, 1)], ids=str)
def test_a_step_costs_the_same_by_the_rule_and_by_listed_rows(ranks: Ranks, layout: RankLayout, exchange: str) -> None:
    """The same bytes of every kind, look-ups at every tier, kernels, waits of the host and bytes of the directory."""
    pool = ranks(4)
    by_rule = pool.run("copied_jobs:measured", layout, exchange, True)
    listed = pool.run("copied_jobs:measured", layout, exchange, False)
    for rule, chunk in zip(by_rule, listed, strict=True):
        assert rule["costs"] == chunk["costs"]
        assert rule["costs"]["traffic"]["device_accesses"] > 0
        assert rule["costs"]["launches"].total() > 100
        assert rule["bit_equal"]
        assert chunk["bit_equal"]
        for name, table in rule["tables"].items():
            np.testing.assert_array_equal(chunk["tables"][name], table)
