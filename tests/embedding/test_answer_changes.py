"""Answers of pooled tables that change in training: training is that of one process, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from tests.support.exactness import Scenario, train_alone
from tests.support.rank_pool import RankPool
from tests.support.run_ahead_jobs import Loop

Ranks = Callable[[int], RankPool]
PAIRS = RankLayout(2, 2)
ROWS, SUMS = ("rows", "rows"), ("sums", "sums")
CHANGING = Scenario(2, 2, steps=10, migrate_every=1, replica_fraction=0.6, answered_by=ROWS, answers_change=True)
CASES = [
    (CHANGING, Loop(ahead=False)),
    (replace(CHANGING, optimizer="adam", homes=("rank:1", "node:0"), two_dims=True, seed=1), Loop(depth=3)),
    (replace(CHANGING, exchange="direct", moved=True, fast_memory_bytes=1_500, slow_file=True, seed=2), Loop(depth=2)),
    (replace(CHANGING, answered_by=SUMS, passes=3, second_rate=0.25, rules_change=True, seed=3), Loop()),
    (replace(CHANGING, joined=True, optimizer="adagrad", seed=4), Loop(ahead=False, evaluate_every=2, read_every=3)),
    (replace(CHANGING, joined=True, passes=3, seed=5), Loop(one_thread=True, evaluate_every=3)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_training_with_changing_answers_equals_one_process(ranks: Ranks, case: int) -> None:
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
        assert result["answers"] == results[0]["answers"]
        assert result["answer_changes"] >= 3
        for name, table in tables.items():
            np.testing.assert_allclose(result["tables"][name], table, rtol=0, atol=1e-9)


def test_what_was_saved_with_other_answers_is_loaded(ranks: Ranks) -> None:
    """A save of before some changes is loaded after them, again and again."""
    scenario = replace(CHANGING, optimizer="adam", two_dims=True, steps=12, seed=7)
    changed, still = (
        ranks(4).run("run_ahead_jobs:train", replace(scenario, answers_change=changes), Loop(save_every=3))
        for changes in (True, False)
    )
    for one, other in zip(changed, still, strict=True):
        assert one["answer_changes"] >= 3
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=0, atol=1e-9)
        for name, table in other["tables"].items():
            np.testing.assert_allclose(one["tables"][name], table, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ahead", [False, True])
def test_weights_with_and_without_gradients_keep_their_answers(ranks: Ranks, ahead: bool) -> None:
    """Bags of weights, weights with gradients, means and batches without features."""
    still, changing = (
        ranks(4).run("bag_jobs:train", PAIRS, "chain", ahead, 0, ROWS, ("all", "all"), every) for every in (0, 2)
    )
    for one, other in zip(changing, still, strict=True):
        assert one["answer_changes"] >= 3
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=0, atol=1e-9)
        for grads, expected in zip(one["weight_grads"], other["weight_grads"], strict=True):
            assert grads.keys() == expected.keys()
            for name, grad in grads.items():
                assert (grad is None) == (expected[name] is None)
                if grad is not None:
                    np.testing.assert_allclose(grad, expected[name], rtol=0, atol=1e-9)
        for name, table in other["tables"].items():
            np.testing.assert_allclose(one["tables"][name], table, rtol=0, atol=1e-9)


def test_an_evaluation_of_joined_collections_keeps_the_answers_of_its_look_up(ranks: Ranks) -> None:
    """A chunk is applied by another look-up while a member has not read its part."""
    for result in ranks(2).run("answer_jobs:evaluate_between", RankLayout(2, 1)):
        assert result["version"] == 1
        np.testing.assert_allclose(result["late"], result["early"], rtol=0, atol=1e-12)


def test_batches_farther_ahead_are_resolved_again(ranks: Ranks) -> None:
    still, changing = (ranks(4).run("answer_jobs:farther_ahead", PAIRS, changes) for changes in (False, True))
    for one, other in zip(changing, still, strict=True):
        assert one["changes"] >= 4
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=0, atol=1e-9)


def test_a_table_without_sums_costs_no_collective_of_bags(ranks: Ranks) -> None:
    """Collectives are those of rows before the first table answers by sums, and again after the last one does."""
    for result in ranks(4).run("answer_jobs:collectives", PAIRS):
        before, during, after = result
        assert before == after < during


def test_changes_that_cannot_be_are_refused_by_name(ranks: Ranks) -> None:
    for refused in ranks(2).run("answer_jobs:refused", RankLayout(2, 1)):
        for text, expected in zip(
            refused,
            [
                "chunk 1: table 'item' answers by rows already",
                "chunk 1: table 'shop' answers by sums already",
                "chunk 1: table 'copied' cannot answer by sums, which make no use of its copies on every rank",
                "chunk 1: table 'plain' cannot change its answer: its look-ups are not pooled",
                "chunk 1: table 9 cannot change its answer",
                "chunk 2: table 'item' answers by sums already",
                "chunk 1: table 'item' cannot change its answer: its look-ups are not pooled",
            ],
            strict=True,
        ):
            assert expected in text
