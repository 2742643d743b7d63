"""Seconds of bytes and collectives: which are counted, and at which curve."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from flexd.core.placement import RankLayout
from flexd.planner.model.prices import (
    DEAD_BAND,
    EXCHANGE_PHASES,
    LARGEST_FACTOR,
    MIN_REPORTS,
    Exchange,
    PriceCorrection,
    TrafficPhase,
    prices,
)
from flexd.topology.cluster import INTER, INTRA, Cluster, CollectiveCurve, Exposed, LinkModel
from tests.support.planner_cases import cluster, group_cost, load, zipf

A = 0.7
LAYOUT = RankLayout(3, 4)


@pytest.mark.parametrize(
    ("layout", "tiers", "collectives"),
    [
        (RankLayout(2, 2), [0], 8),
        (RankLayout(2, 2), [0, 1], 9),
        (RankLayout(2, 2), [0, 2], 10),
        (RankLayout(2, 2), [0, 1, 2], 10),
        (RankLayout(1, 4), [0], 4),
        (RankLayout(1, 4), [0, 2], 5),
        (RankLayout(4, 1), [0, 1], 5),
        (RankLayout(1, 1), [0], 0),
    ],
)
@pytest.mark.parametrize("narrow", [False, True])
def test_latency_counts_the_collectives(layout: RankLayout, tiers: list[int], collectives: int, narrow: bool) -> None:
    problem = load(np.full(len(tiers), A), narrow=narrow)
    cost = group_cost(problem, np.array(tiers, np.uint8), layout, cluster(latency=1.0))
    assert cost.latency_seconds.sum() == pytest.approx(collectives)


@pytest.mark.parametrize(("micro_batches", "frozen"), [(4, False), (1, False), (4, True)])
@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(4, 1)], ids=["2x2", "4x1"])
def test_micro_batches_count_each_forward_pass_and_merged_gradients_once(
    layout: RankLayout, micro_batches: int, frozen: bool
) -> None:
    """Sizes, ids and rows travel in every forward pass, gradients and sums once per step."""
    problem = load(np.full(2, A), micro_batches=micro_batches, trained=np.zeros(2) if frozen else None)
    latency = group_cost(problem, np.array([0, 1], np.uint8), layout, cluster(latency=1.0)).latency_seconds
    hops = [INTER] if layout.local_ranks == 1 else [INTRA, INTER]
    for link in hops:
        assert latency[TrafficPhase.FORWARD_IDS, link] == 2 * micro_batches
        assert latency[TrafficPhase.FORWARD_ROWS, link] == micro_batches
        assert latency[TrafficPhase.BACKWARD_ROWS, link] == (not frozen)
    assert latency[TrafficPhase.SYNC_ROWS, INTER] == (0 if frozen else 1)
    assert latency.sum() == len(hops) * (3 * micro_batches + (not frozen)) + (not frozen)


def test_a_direct_all_to_all_takes_as_long_as_its_slower_link() -> None:
    problem = load(zipf(50, 1.0, 50.0))
    machine = cluster(all_to_all=10e9, intra=100e9)
    cost = group_cost(problem, np.zeros(50, np.uint8), LAYOUT, machine, Exchange.DIRECT_DEDUP)
    assert cost.transfer_seconds[:, :, INTRA].sum() == 0
    assert cost.transfer_seconds[:, :, INTER].sum() == pytest.approx(cost.bytes[:, :, INTER].sum() / 10e9)
    assert cost.bytes[:, :, INTRA].sum() > 0


def test_a_message_is_that_of_one_micro_batch_and_of_all_tiers() -> None:
    rising = CollectiveCurve(0.0, ((1.0, 1e6), (1e9, 1e11)))
    link = LinkModel(1e12, rising, rising, rising)
    machine = Cluster("m", "s", link, link)
    sent = np.random.default_rng(1).uniform(1e5, 1e6, (3, 6, 2))
    price = prices(sent, machine, 4)
    for phase in TrafficPhase:
        sizes = sent[:, phase, INTER].sum()
        if phase in EXCHANGE_PHASES:
            sizes /= 4
        if phase == TrafficPhase.SYNC_MASK:  # travels with the rows
            sizes = sent[:, TrafficPhase.FORWARD_ROWS, INTER].sum() / 4
        np.testing.assert_allclose(price[:, phase, INTER], rising.seconds_per_byte(sizes))


def test_what_can_run_beside_compute_is_exposed_beyond_it() -> None:
    problem, tiers = load(np.full(4, A)), np.array([0, 1, 2, 2], np.uint8)
    beside = Exposed(1.0, 0.5, 0.25)
    all_hidden = group_cost(problem, tiers, LAYOUT, cluster(latency=1e-6, exposed=beside))
    hidden = 0.5 * all_hidden.backward_seconds + 0.75 * all_hidden.sync_seconds
    for cover in (0.0, 0.25 * hidden, hidden, 2 * hidden):
        exposed = replace(beside, cover_seconds=cover)
        cost = group_cost(problem, tiers, LAYOUT, cluster(latency=1e-6, exposed=exposed))
        assert cost.exposed_seconds == pytest.approx(all_hidden.exposed_seconds + max(0.0, hidden - cover))


def learnt(factor: float, reports: int = 40, noise: float = 0.0, start: PriceCorrection | None = None):
    rng, correction = np.random.default_rng(0), start or PriceCorrection()
    for _ in range(reports):
        predicted = rng.uniform(1e-3, 5e-3)
        correction = correction.learn(predicted, factor * predicted * math.exp(noise * rng.standard_normal()))
    return correction


@pytest.mark.parametrize("factor", [0.3, 1.5, 2.6, 6.0])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_factor_is_found_and_used(factor: float, noise: float) -> None:
    found = learnt(factor, noise=noise)
    assert found.used
    assert found.factor == pytest.approx(factor, rel=0.2)
    probed, corrected = found.error_shares()
    assert corrected < probed
    assert found.reason().startswith(f"x{found.factor:.2f}: held-out error")


def test_nothing_is_corrected_before_there_are_enough_reports() -> None:
    assert not learnt(3.0, MIN_REPORTS - 1).used
    assert learnt(3.0, MIN_REPORTS - 1).reason() == f"as probed: {MIN_REPORTS - 1} of {MIN_REPORTS} reports"
    assert all(map(math.isnan, PriceCorrection().error_shares()))


@pytest.mark.parametrize(("factor", "noise"), [(1.0, 0.0), (1.03, 0.0), (1.0, 0.1), (1.0, 1.5)])
def test_prices_that_hold_or_that_no_factor_explains_are_not_touched(factor: float, noise: float) -> None:
    found = learnt(factor, noise=noise)
    assert (found.used, found.factor) == (False, 1.0)
    assert found.reason().startswith("as probed: held-out error")


def test_a_link_that_changes_back_is_as_probed_again() -> None:
    assert not learnt(1.0, start=learnt(4.0)).used


def test_a_factor_moves_only_beyond_the_dead_band() -> None:
    found = learnt(3.0)
    assert learnt(3.0 * (1 + DEAD_BAND / 3), start=found).factor == found.factor
    assert learnt(4.0, start=found).factor == pytest.approx(4.0, rel=0.15)


def test_factors_are_bounded() -> None:
    assert learnt(100.0).factor <= LARGEST_FACTOR
    assert learnt(0.01).factor >= 1 / LARGEST_FACTOR


@pytest.mark.parametrize("sample", [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf), (-1.0, 1.0)])
def test_an_unusable_report_changes_nothing(sample: tuple[float, float]) -> None:
    found = learnt(3.0)
    assert found.learn(*sample) is found
