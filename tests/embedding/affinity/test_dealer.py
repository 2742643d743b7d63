"""Dealing of samples over real ranks: the same global batches, fewer bytes, errors on every rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from tests.support.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
STEPS, SAMPLES = 8, 24


@pytest.fixture(scope="module")
def undealt(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks(4).run("deal_jobs:mean_loss", RankLayout(2, 2), False, STEPS, SAMPLES)


@pytest.mark.parametrize("one_thread", [False, True])
def test_a_mean_over_the_global_batch_is_that_without_dealing(
    ranks: Ranks, undealt: list[dict[str, Any]], one_thread: bool
) -> None:
    dealt = ranks(4).run("deal_jobs:mean_loss", RankLayout(2, 2), True, STEPS, SAMPLES, one_thread)
    losses, expected = (np.mean([of_rank["losses"] for of_rank in results], axis=0) for results in (dealt, undealt))
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    np.testing.assert_allclose(dealt[0]["table"], undealt[0]["table"], rtol=0, atol=1e-9)
    for step in range(STEPS):
        numbers = [of_rank["numbers"][step] for of_rank in dealt]
        assert [len(of_rank) for of_rank in numbers] == [SAMPLES] * 4
        read = [of_rank["numbers"][step] for of_rank in undealt]
        assert sorted(chain(*numbers)) == sorted(chain(*read))
    assert all(of_rank["fits"] for of_rank in dealt), "a sample's parts were torn apart"
    assert dealt[0]["dealt"]["shipped_samples"] > STEPS


def test_the_saving_as_priced_is_what_the_traffic_has(ranks: Ranks, undealt: list[dict[str, Any]]) -> None:
    dealt = ranks(4).run("deal_jobs:mean_loss", RankLayout(2, 2), True, STEPS, SAMPLES)
    before, after = (sum(of_rank["inter"] for of_rank in results) for results in (undealt, dealt))
    assert after < 0.8 * before
    assert before - after == pytest.approx(dealt[0]["saved"], rel=0.006)
    assert all(of_rank["dealt"] == dealt[0]["dealt"] for of_rank in dealt), "ranks count other totals"


@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(4, 1)])
def test_ranks_take_turns_to_deal_for_all(ranks: Ranks, layout: RankLayout) -> None:
    assert ranks(4).run("deal_jobs:turns", layout, 8) == [(8, 2, "")] * 4


def test_every_rank_hears_of_a_rank_that_cannot_deal(ranks: Ranks) -> None:
    for rank, (steps, times, text) in enumerate(ranks(4).run("deal_jobs:turns", RankLayout(2, 2), 8, 1, timeout=60)):
        assert (steps, times) == (0, int(rank == 0)), text
        assert "rank 1: dealing a batch failed: no memory for prices" in text


def test_nothing_happens_on_one_node(ranks: Ranks) -> None:
    dealt = ranks(2).run("deal_jobs:mean_loss", RankLayout(1, 2), True, 2, SAMPLES)
    assert dealt[0]["dealt"]["dealt_batches"] == 0
    assert dealt[0]["inter"] == 0


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("set", "batch['more'] is a set, which cannot be shipped"),
        ("samples", "batch['item'] has 6 samples, batch['label'] has 3"),
        ("scalar", "batch['more'] has shape ()"),
        ("lengths", "batch['more'] has 3 values, its lengths sum to 6"),
        ("ids", "feature 'item'"),
    ],
)
def test_a_batch_that_cannot_be_dealt_is_an_error_on_every_rank(ranks: Ranks, kind: str, says: str) -> None:
    results = ranks(4).run("deal_jobs:refused", RankLayout(2, 2), kind, 3, timeout=60)
    for rank, (steps, text) in enumerate(results):
        assert steps == 2
        assert (says if rank == 3 else "rank 3") in text


def test_batches_of_other_structure_are_named_on_every_rank(ranks: Ranks) -> None:
    for steps, text in ranks(4).run("deal_jobs:refused", RankLayout(2, 2), "structure", 2, timeout=60):
        assert steps == 2
        assert "the batch of rank 2 has other parts than that of rank 0" in text


@pytest.mark.parametrize("batches", [[3, 3, 2, 3], [0, 1, 1, 1], [2, 2, 2, 2]])
def test_uneven_loaders_are_an_error_on_every_rank(ranks: Ranks, batches: list[int]) -> None:
    for steps, text in ranks(4).run("deal_jobs:uneven", RankLayout(2, 2), batches, timeout=60):
        assert steps == min(batches)
        assert ("has no further batch, other ranks have" in text) == (len(set(batches)) > 1)
