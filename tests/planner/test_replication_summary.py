"""Gains and costs of replication in sentences."""

from __future__ import annotations

import numpy as np

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.row_bytes import Exchange
from flexd.planner.replication_summary import replication_words
from tests.support.planner_cases import cluster, group_cost, load, zipf

LAYOUT = RankLayout(2, 2)


def messages_of(accesses: np.ndarray, tier: Tier, **machine: float) -> tuple[list[str], float]:
    """Return (the sentences, exposed microseconds saved)."""
    problem, prices = load(accesses), cluster(**machine)
    tiers = [np.full(len(accesses), each, np.uint8) for each in (Tier.HOME, tier)]
    home, plan = (group_cost(problem, each, LAYOUT, prices) for each in tiers)
    dedup = group_cost(problem, tiers[0], LAYOUT, prices, Exchange.DIRECT_DEDUP)
    return replication_words(home, plan, prices, dedup), 1e6 * (home.exposed_seconds - plan.exposed_seconds)


def test_the_first_sentence_is_the_saving_and_bandwidths_are_those_of_the_messages() -> None:
    messages, saved = messages_of(np.full(2000, 5.0), Tier.NODE)
    assert saved > 0
    assert messages[0].startswith(f"replicas save {saved:.3g} us of exposed communication per step")
    assert "20 GB/s a rank (80% of the wire), an all-to-all 10 GB/s (40%): 2.00 times as much" in messages[2]
    assert not any("exchange 'direct'" in sentence for sentence in messages)


def test_replicas_that_cost_more_are_said_to_cost_more() -> None:
    messages, saved = messages_of(np.full(2000, 0.05), Tier.NODE, all_reduce=9e9)
    assert saved < 0
    assert messages[0].startswith(f"replicas cost {-saved:.3g} us more exposed communication per step")


def test_the_cheaper_direct_exchange_is_named_where_it_is_cheaper() -> None:
    messages, _ = messages_of(zipf(50, 1.0, 50.0), Tier.HOME, latency=1e-3)
    assert any("exchange 'direct'" in sentence for sentence in messages)
    assert "no row is replicated" in messages[0]
