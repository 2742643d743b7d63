"""Tables of every home rule train as one process does, with copies, sums, two memories and run-ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from tests.support import home_rule_jobs
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


PAIRS = RankLayout(2, 2)


@pytest.mark.parametrize("exchange", ["chain", "direct"])
def test_a_table_copied_to_every_rank_is_read_without_a_request(ranks: Ranks, exchange: str) -> None:
    """Its rows are where a chunk cannot move them, and a listing for the daemon leaves them out."""
    for result in ranks(4).run(home_rule_jobs.copied, PAIRS, exchange):
        assert result["home_accesses"] == 0
        assert result["device_accesses"] == 4 * 9
        assert result["bit_equal"]
        assert result["listed"] == 0
        assert "not at the tier" in result["refused"]
        assert result["slots"] == 5


@pytest.mark.parametrize("form", ["series", "whole"])
@pytest.mark.parametrize("window_bytes", [300, 2**20])
def test_checkpoints_load_into_any_other_rules_and_number_of_ranks(
    ranks: Ranks, tmp_path: Path, form: str, window_bytes: int
) -> None:
    """In windows of a few rows, saved in blocks by all ranks, or whole by an owner."""
    rules = ("node:1", "all", "rank:2")
    saved = ranks(4).run(home_rule_jobs.save, PAIRS, rules, str(tmp_path), window_bytes)[0]
    jobs = [(PAIRS, ("rank:1", "node:0", "all")), (RankLayout(1, 2), ("all", "rank:1", "node:0"))]
    for layout, others in jobs:
        job = (home_rule_jobs.load, layout, others, str(tmp_path), form, window_bytes)
        for result in ranks(layout.world_size).run(*job):
            for name, table in saved["saved"].items():
                np.testing.assert_array_equal(result["saved"][name], table)
                if layout == PAIRS:  # the same batches: the state of the optimizer was loaded too
                    np.testing.assert_allclose(result["after"][name], saved["after"][name], rtol=0, atol=1e-12)
