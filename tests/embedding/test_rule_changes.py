"""Home rules that change in training: nothing is lost on the way, and training is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from tests.support.exactness import Scenario, train_alone
from tests.support.rank_pool import RankPool
from tests.support.run_ahead_jobs import Loop

Ranks = Callable[[int], RankPool]
PAIRS = RankLayout(2, 2)
CHANGING = Scenario(2, 2, steps=8, migrate_every=1, replica_fraction=0.6, rules_change=True)
CASES = [
    (CHANGING, Loop(ahead=False)),
    (replace(CHANGING, optimizer="adam", homes=("rank:1", "node:0"), two_dims=True, seed=1), Loop(depth=3)),
    (replace(CHANGING, exchange="direct", moved=True, fast_memory_bytes=1_500, slow_file=True, seed=2), Loop(depth=2)),
    (replace(CHANGING, answered_by=("sums", "rows"), passes=3, second_rate=0.25, seed=3), Loop()),
    (replace(CHANGING, optimizer="adagrad", moved=True, seed=4), Loop(ahead=False, evaluate_every=2, read_every=3)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_training_with_changing_rules_equals_one_process(ranks: Ranks, case: int) -> None:
    scenario, loop = CASES[case]
    results = ranks(4).run("run_ahead_jobs:train", scenario, loop)
    losses, tables = train_alone(scenario)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["trained"], losses[rank], rtol=0, atol=1e-9)
    trained = np.sum([result["trained"] for result in results], axis=0)
    np.testing.assert_allclose(trained, np.sum(losses, axis=0), rtol=0, atol=1e-8)
    for result in results:
        assert result["unequal"] == 0
        assert result["versions"] == results[0]["versions"]
        assert result["digest"] == results[0]["digest"]
        assert result["rules"] == results[0]["rules"]
        assert result["home_changes"] >= 2
        for name, table in tables.items():
            np.testing.assert_allclose(result["tables"][name], table, rtol=0, atol=1e-9)


@pytest.mark.parametrize("loop", [Loop(ahead=False, save_every=3), Loop(save_every=2, evaluate_every=2)])
def test_what_was_saved_under_other_rules_is_loaded(ranks: Ranks, loop: Loop) -> None:
    """``state_dict`` has rows by slots, and each is loaded where a later one has its homes."""
    scenario = replace(CHANGING, optimizer="adam", two_dims=True, steps=12, seed=6)
    changed = ranks(4).run("run_ahead_jobs:train", scenario, loop)
    still = ranks(4).run("run_ahead_jobs:train", replace(scenario, rules_change=False), loop)
    for one, other in zip(changed, still, strict=True):
        assert one["home_changes"] >= 3
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=0, atol=1e-9)
        for name, table in other["tables"].items():
            np.testing.assert_allclose(one["tables"][name], table, rtol=0, atol=1e-9)


@pytest.mark.parametrize("form", ["series", "whole"])
def test_checkpoints_of_the_middle_of_a_change_load_anywhere(ranks: Ranks, tmp_path: Path, form: str) -> None:
    """The second save of the series has the rows that were changed, or that moved, since the first alone."""
    saved = ranks(4).run("home_rule_jobs:save_changing", PAIRS, str(tmp_path), 300)
    assert [of_rank["boundaries"] for of_rank in saved] == [[20, 11, 0]] * 4
    for layout, rules in ((PAIRS, ("rank:1", "node:0", "all")), (RankLayout(1, 2), ("all", "rank:1", "node:0"))):
        job = ("home_rule_jobs:load", layout, rules, str(tmp_path), form, 300)
        for result in ranks(layout.world_size).run(*job):
            for name, table in saved[0]["saved"].items():
                np.testing.assert_array_equal(result["saved"][name], table)
                if layout == PAIRS:
                    np.testing.assert_allclose(result["after"][name], saved[0]["after"][name], rtol=0, atol=1e-12)


def test_blocks_that_cannot_go_are_refused_by_name(ranks: Ranks) -> None:
    for refused in ranks(4).run("home_rule_jobs:refused_blocks", PAIRS):
        for text, expected in zip(
            refused,
            [
                "rows 4 to 9 of table 0 cannot go from rule all to rank:1: it has 61 rows and the home rule all",
                "from rule all to all",
                "home rule rank:9 in a job of 2 nodes x 2 ranks",
                "cannot change while rows are in use",
                "needs 61 home slots in a row on each of its ranks, and there are none",
                "3 of 30 rows of chunk 2 are not at the tier",
                "to rank:1: it has 61 rows and the home rule node:1 below row 30, all from there",
            ],
            strict=True,
        ):
            assert expected in text
