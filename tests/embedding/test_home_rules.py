"""Tables of every home rule train as one process does, with copies, sums, two memories and run-ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from flexd.embedding.bag_collection import EmbeddingBagTable
from tests.support.exactness import Scenario, train_alone
from tests.support.rank_pool import RankPool
from tests.support.run_ahead_jobs import Loop

Ranks = Callable[[int], RankPool]
MIXED = Scenario(2, 2, steps=6, migrate_every=1, replica_fraction=0.6, homes=("node:1", "rank:2"))
CASES = [
    MIXED,
    replace(MIXED, homes=("rank:3", "all"), exchange="direct", optimizer="adagrad", second_rate=0.25, seed=1),
    replace(MIXED, homes=("all", "node:0"), two_dims=True, fast_memory_bytes=1_500, seed=2),
    replace(MIXED, homes=("rank:1", "node:1"), two_dims=True, answered_by=("sums", "sums"), passes=3, seed=3),
    replace(MIXED, homes=("node:0", "rank:1"), answered_by=("sums", "rows"), optimizer="adam", seed=5),
    replace(MIXED, homes=("every rank", "node:1"), optimizer="adam", second_rate=0.25, seed=6),
]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_training_with_rules_equals_one_process(ranks: Ranks, case: int, ahead: bool) -> None:
    scenario = CASES[case]
    results = ranks(4).run("run_ahead_jobs:train", scenario, Loop(ahead=ahead))
    losses, tables = train_alone(scenario)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["trained"], losses[rank], rtol=0, atol=1e-9)
        assert result["unequal"] == 0
        assert result["versions"] == results[0]["versions"]
        assert result["digest"] == results[0]["digest"]
        for name, table in tables.items():
            np.testing.assert_allclose(result["tables"][name], table, rtol=0, atol=1e-9)
    assert results[0]["versions"][-1] > 0, "no chunk was applied"


PAIRS = RankLayout(2, 2)


@pytest.mark.parametrize("exchange", ["chain", "direct"])
def test_a_table_copied_to_every_rank_is_read_without_a_request(ranks: Ranks, exchange: str) -> None:
    """Its rows are where a chunk cannot move them, and a listing for the daemon leaves them out."""
    for result in ranks(4).run("home_rule_jobs:copied", PAIRS, exchange):
        assert result["home_accesses"] == 0
        assert result["device_accesses"] == 4 * 9
        assert result["bit_equal"]
        assert result["listed"] == 0
        assert "not at the tier" in result["refused"]
        assert result["slots"] == 5


def test_sums_of_a_table_that_is_copied_to_every_rank_are_refused() -> None:
    with pytest.raises(EmbeddingError, match="makes no use of copies"):
        EmbeddingBagTable("item", 4, 4, answer="sums", homes="every rank")


def test_a_rule_that_the_job_cannot_have_is_an_error_on_every_rank(ranks: Ranks) -> None:
    for text in ranks(4).run("home_rule_jobs:impossible", PAIRS):
        assert "home rule node:2 in a job of 2 nodes x 2 ranks" in text
    for text in ranks(4).run("home_rule_jobs:unequal", PAIRS):
        assert "ranks [1, 3] have other tables than rank 0" in text


@pytest.mark.parametrize("form", ["series", "whole"])
@pytest.mark.parametrize("window_bytes", [300, 2**20])
def test_checkpoints_load_into_any_other_rules_and_number_of_ranks(
    ranks: Ranks, tmp_path: Path, form: str, window_bytes: int
) -> None:
    """In windows of a few rows, saved in blocks by all ranks, or whole by an owner."""
    rules = ("node:1", "all", "rank:2")
    saved = ranks(4).run("home_rule_jobs:save", PAIRS, rules, str(tmp_path), window_bytes)[0]
    jobs = [(PAIRS, ("rank:1", "node:0", "all")), (RankLayout(1, 2), ("all", "rank:1", "node:0"))]
    for layout, others in jobs:
        job = ("home_rule_jobs:load", layout, others, str(tmp_path), form, window_bytes)
        for result in ranks(layout.world_size).run(*job):
            for name, table in saved["saved"].items():
                np.testing.assert_array_equal(result["saved"][name], table)
                if layout == PAIRS:  # the same batches: the state of the optimizer was loaded too
                    np.testing.assert_allclose(result["after"][name], saved["after"][name], rtol=0, atol=1e-12)


def test_rows_and_states_of_a_rank_are_loaded_by_any_rule(ranks: Ranks) -> None:
    spread = ranks(4).run("home_rule_jobs:given_rows", PAIRS, ("all", "all", "all"))[0]
    for rules in (("node:1", "rank:3", "all"), ("rank:0", "node:0", "node:1")):
        for tables in ranks(4).run("home_rule_jobs:given_rows", PAIRS, rules):
            for table, expected in zip(tables, spread, strict=True):
                np.testing.assert_array_equal(table, expected)
