"""Savings of replication in figures and sentences."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.row_bytes import Exchange, TrafficLink
from flexd.planner.replication_summary import summarise_replication
from tests.support.planner_cases import cluster, group_cost, load, zipf

LAYOUT = RankLayout(2, 2)


def summary_of(accesses: np.ndarray, tier: Tier, **machine: float) -> dict:
    problem, prices = load(accesses), cluster(**machine)
    tiers = [np.full(len(accesses), each, np.uint8) for each in (Tier.HOME, tier)]
    home, plan = (group_cost(problem, each, LAYOUT, prices) for each in tiers)
    dedup = group_cost(problem, tiers[0], LAYOUT, prices, Exchange.DIRECT_DEDUP)
    return summarise_replication(home, plan, prices, dedup)


def test_figures_add_up_and_the_first_sentence_is_the_saving() -> None:
    summary = summary_of(np.full(2000, 5.0), Tier.NODE)
    assert summary["replicated_rows"] == 2000
    saved = summary["saved_exposed_seconds"]
    assert saved > 0
    assert saved == pytest.approx(
        summary["forward_freed_seconds"] + summary["backward_freed_seconds"] - summary["sync_seconds"]
    )
    assert summary["words"][0].startswith(f"replicas save {saved * 1e6:.3g} us of exposed communication a step")


def test_replicas_that_cost_more_are_said_to_cost_more() -> None:
    summary = summary_of(np.full(2000, 0.05), Tier.NODE, all_reduce=9e9)
    cost = -summary["saved_exposed_seconds"]
    assert cost > 0
    assert summary["words"][0].startswith(f"replicas cost {cost * 1e6:.3g} us more exposed communication a step")


def test_the_cheaper_direct_exchange_is_named_only_where_it_is_cheaper() -> None:
    cheap = summary_of(zipf(50, 1.0, 50.0), Tier.HOME, latency=1e-3)
    assert any("exchange 'direct'" in sentence for sentence in cheap["words"])
    assert "no row is replicated" in cheap["words"][0]
    dear = summary_of(np.full(2000, 5.0), Tier.NODE)
    assert not any("exchange 'direct'" in sentence for sentence in dear["words"])


def test_bandwidths_are_those_of_the_messages() -> None:
    problem = load(np.full(2000, 5.0))
    tiers = np.full(2000, Tier.NODE, np.uint8)
    plan = group_cost(problem, tiers, LAYOUT, cluster())
    summary = summary_of(np.full(2000, 5.0), Tier.NODE)
    assert summary["inter_node_sync_bytes_added"] == plan.sync_bytes(TrafficLink.INTER_NODE)
    assert summary["all_reduce_bytes_per_second"] == pytest.approx(20e9)
    assert summary["all_to_all_bytes_per_second"] == pytest.approx(10e9)
    assert summary["all_reduce_wire_share"] == pytest.approx(0.8)
    assert "2.00 times as much" in " ".join(summary["words"])
