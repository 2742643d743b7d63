"""The exchange changes between steps by agreement, without any effect on the result; the faster one is kept."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from flexd.control.protocol.report import ExchangeReason
from flexd.embedding.exchange.exchange_choice import ExchangeChoice, ExchangeTrial
from tests.support import run_ahead_jobs
from tests.support.exactness import Scenario, train_alone
from tests.support.rank_pool import RankPool
from tests.support.run_ahead_jobs import Loop

Ranks = Callable[[int], RankPool]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "ahead"),
    [
        (Scenario(2, 2, "rowwise_adagrad", switch_every=2, two_dims=True, seed=2), True),
        (Scenario(2, 2, "adam", switch_every=3, seed=3, exchange="direct", migrate_every=1), False),
        (Scenario(2, 2, "rowwise_adagrad", switch_every=2, passes=2, seed=4), True),
        (Scenario(2, 2, "rowwise_adagrad", exchange="auto", steps=24, seed=5), True),
    ],
    ids=["run-ahead", "from direct", "several passes", "auto"],
)
def test_changes_of_the_exchange_between_steps_are_exact(ranks: Ranks, scenario: Scenario, ahead: bool) -> None:
    """With migrations. A rank at a time proposes, with "auto" the first one as it measures, and all ranks change before
    the same step."""
    results = ranks(4).run(run_ahead_jobs.train, scenario, Loop(ahead=ahead))
    losses, tables = train_alone(scenario)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["losses"], losses[rank], rtol=0, atol=1e-9)
        assert result["unequal"] == 0, "a replica differed from its home copy"
        assert result["versions"] == results[0]["versions"]
        assert result["exchanges"] == results[0]["exchanges"], "ranks changed at different steps"
        for name, table in tables.items():
            np.testing.assert_allclose(result["tables"][name], table, rtol=0, atol=1e-9)
    used = results[0]["exchanges"]
    assert sum(a != b for a, b in pairwise(used)) >= (1 if scenario.exchange == "auto" else 3)
    assert results[0]["versions"][-1] >= 3


def test_the_newest_proposal_is_agreed_and_of_equal_ones_direct() -> None:
    choices = [ExchangeChoice("chain") for _ in range(3)]
    choices[0].propose("direct")
    choices[1].propose("chain")
    for choice in choices:
        choice.agreed(max(other.proposed for other in choices))
    assert [choice.next for choice in choices] == ["direct"] * 3
    assert all(choice.due for choice in choices)
    for choice in choices:
        choice.name = choice.next
    choices[2].propose("chain")
    for choice in choices:
        choice.agreed(max(other.proposed for other in choices))
    assert [(choice.next, choice.due) for choice in choices] == [("chain", True)] * 3


@pytest.mark.parametrize(
    ("direct_seconds", "kept"), [(0.5, "direct"), (0.98, "chain"), (1.5, "chain")], ids=["faster", "equal", "slower"]
)
def test_a_trial_keeps_the_exchange_that_is_clearly_faster(direct_seconds: float, kept: str) -> None:
    now = 0.0
    choice = ExchangeChoice("chain")
    trial = ExchangeTrial(choice, steps=5, interval_steps=100, clock=lambda: now)
    used = []
    for _ in range(60):
        choice.agreed(choice.proposed)
        choice.name = choice.next
        used.append(choice.name)
        now += direct_seconds if choice.name == "direct" else 1.0
        trial.step()
    assert "direct" in used
    assert used[-30:] == [kept] * 30
    assert sum(a != b for a, b in pairwise(used)) == (1 if kept == "direct" else 2)


def test_auto_begins_with_the_priced_exchange_and_keeps_the_measured_one() -> None:
    choice, now = ExchangeChoice("chain", ExchangeReason.START), [0.0]
    trial = ExchangeTrial(choice, steps=2, interval_steps=1000, clock=lambda: now[0])

    def steps(number: int) -> None:
        for _ in range(number):
            choice.agreed(choice.proposed)
            choice.name = choice.next
            now[0] += 1.0 if choice.name == "chain" else 2.0
            trial.step()

    trial.begin_with("")
    trial.begin_with("direct")
    steps(1)
    assert (choice.name, choice.reason) == ("direct", ExchangeReason.PRICED)
    steps(20)
    assert (choice.name, choice.reason) == ("chain", ExchangeReason.MEASURED)
    trial.begin_with("direct")
    steps(3)
    assert choice.name == "chain", "only the first price counts"
