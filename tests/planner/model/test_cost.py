"""Formulas of the cost model, latencies and the baselines; gains of a row are differences of whole costs; seconds of
bytes and collectives: which are counted, and at which curve; corrections by reports."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from flexd.core.errors import PlanError
from flexd.core.placement import RankLayout, Tier
from flexd.planner.model.cost import decision_gains, joint_cost, migration_seconds, row_seconds, usable_tiers
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

N, L, B, A = 3, 4, 128, 0.7
LAYOUT = RankLayout(N, L)
W = N * L
U, V, WW = 1 - np.exp(-A), 1 - np.exp(-L * A), 1 - np.exp(-W * A)


def rows_bytes(tier: Tier, exchange: Exchange = Exchange.CHAIN, *, narrow: bool = False) -> np.ndarray:
    """Bytes of row values by link, of one row at this tier, both directions and the sync."""
    problem = load(np.array([A]), row_bytes=B, narrow=narrow)
    cost = group_cost(problem, np.array([tier], np.uint8), LAYOUT, cluster(), exchange)
    phases = [TrafficPhase.FORWARD_ROWS, TrafficPhase.BACKWARD_ROWS, TrafficPhase.SYNC_ROWS, TrafficPhase.SYNC_SUMS]
    return cost.bytes[:, phases].sum(axis=(0, 1))


def test_the_table_of_the_design() -> None:
    hop2 = (N - 1) / N
    assert rows_bytes(Tier.HOME, Exchange.DIRECT_DEDUP) == pytest.approx(
        [2 * U * B * (L - 1) / W, 2 * U * B * (W - L) / W]
    )
    assert rows_bytes(Tier.HOME) == pytest.approx([2 * U * B * (L - 1) / L, 2 * V / L * B * hop2])
    assert rows_bytes(Tier.NODE) == pytest.approx([2 * U * B * (L - 1) / L, 2 * WW / L * B * hop2])
    assert rows_bytes(Tier.DEVICE) == pytest.approx([(U + WW) * B * (L - 1) / L, 2 * WW / L * B * hop2])
    # Gradients that are not added as they travel go by way of the home.
    assert rows_bytes(Tier.NODE, narrow=True) == pytest.approx([2 * U * B * (L - 1) / L, (V + WW) / L * B * hop2])
    assert rows_bytes(Tier.DEVICE, narrow=True) == pytest.approx([(U + WW) * B * (L - 1) / L, (V + WW) / L * B * hop2])
    assert rows_bytes(Tier.DEVICE, Exchange.DIRECT_DEDUP) == pytest.approx(
        [(U + WW) * B * (L - 1) / W, (U + WW) * B * (W - L) / W]
    )


def test_dim_groups_share_the_collectives() -> None:
    problem, tiers = load(np.full(5, A)), np.ones(5, np.uint8)
    one = group_cost(problem, tiers, LAYOUT, cluster(latency=1e-6))
    three = joint_cost([replace(problem, layout=LAYOUT)] * 3, [tiers] * 3, cluster(latency=1e-6))
    assert three.ids_sent == pytest.approx(3 * one.ids_sent)
    np.testing.assert_allclose(three.transfer_seconds, 3 * one.transfer_seconds)
    np.testing.assert_array_equal(three.latency_seconds, one.latency_seconds)
    with pytest.raises(PlanError, match="no dim-group"):
        joint_cost([], [], cluster())


GAIN_LAYOUT = RankLayout(3, 2)
SENT = np.zeros((3, 6, 2))
NONE = np.inf


@pytest.mark.parametrize("exchange", list(Exchange), ids=lambda each: each.value)
@pytest.mark.parametrize("intra", [0.5e9, 100e9], ids=["slow node", "fast node"])
@pytest.mark.parametrize("layout", [GAIN_LAYOUT, RankLayout(1, 4), RankLayout(4, 1)], ids=["3x2", "1x4", "4x1"])
def test_a_gain_is_the_difference_of_two_whole_costs(layout: RankLayout, exchange: Exchange, intra: float) -> None:
    """Whichever link of a direct all-to-all is the slower one, and whatever else is at HOME."""
    problem, machine = load(np.random.default_rng(0).pareto(1.0, 30), layout=layout), cluster(intra=intra)
    seconds = row_seconds(problem, machine, SENT, exchange) @ problem.statistics
    base = group_cost(problem, np.zeros(30, np.uint8), layout, machine, exchange).exposed_seconds
    for tier in usable_tiers(layout, exchange):
        whole = group_cost(problem, np.full(30, tier, np.uint8), layout, machine, exchange).exposed_seconds
        assert (seconds[Tier.HOME] - seconds[tier]).sum() == pytest.approx(base - whole, rel=1e-9)


def decided(
    accesses: float, live: Tier, *, error: float = 0.0, horizon: float = NONE, machine: Cluster | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """float64[tier] twice, of one row: gains to decide by, gains of the estimate."""
    problem = load(np.array([accesses]), relative_error=error, layout=GAIN_LAYOUT)
    live_tiers = np.array([live], np.uint8)
    decision, plain = decision_gains(problem, live_tiers, machine or cluster(), SENT, Exchange.CHAIN, horizon)
    return decision[:, 0], plain[:, 0]


def test_bounds_hold_where_a_gain_falls_with_the_accesses() -> None:
    """With two nodes the gain of NODE is largest between few and many accesses: neither bound alone is the worst."""
    slow = cluster(all_reduce=9e9)
    grid = [decided(a, Tier.HOME, machine=slow)[1][Tier.NODE] for a in (0.05, 0.2, 5.0)]
    assert min(grid[0], grid[1]) < grid[2]
    decision, plain = decided(0.2, Tier.HOME, error=0.75, machine=slow)
    low = decided(0.05, Tier.HOME, machine=slow)[1]
    assert low[Tier.NODE] > plain[Tier.NODE], "the estimate is below the gain at the lower bound"
    assert decision[Tier.NODE] == pytest.approx(plain[Tier.NODE])
    kept, _ = decided(0.2, Tier.NODE, error=0.75, machine=slow)
    assert kept[Tier.NODE] >= plain[Tier.NODE]


def test_a_further_copy_is_paid_for_and_the_first_is_not() -> None:
    decision, plain = decided(3.0, Tier.NODE, horizon=50.0)
    paid = migration_seconds(load(np.ones(1), layout=GAIN_LAYOUT), cluster()) / 50.0
    np.testing.assert_allclose(decision[:2], plain[:2])
    assert decision[Tier.DEVICE] == pytest.approx(plain[Tier.DEVICE] - paid[Tier.DEVICE])


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


def test_a_message_is_that_of_one_micro_batch_and_of_all_tiers_at_its_collective() -> None:
    curves = [CollectiveCurve(0.0, ((1.0, start), (1e9, 1e11))) for start in (1e6, 2e6, 3e6, 4e6)]
    machine = Cluster("m", "s", LinkModel(1e12, *curves[:2], curves[0]), LinkModel(1e12, *curves[2:], curves[2]))
    sent = np.random.default_rng(1).uniform(1e5, 1e6, (3, 6, 2))
    price = prices(sent, machine, 4)
    for phase, link in itertools.product(TrafficPhase, (INTRA, INTER)):
        # Touched bits travel with the rows.
        of = TrafficPhase.FORWARD_ROWS if phase == TrafficPhase.SYNC_MASK else phase
        size = sent[:, of, link].sum() / (4 if of in EXCHANGE_PHASES else 1)
        curve = curves[2 * link + (phase == TrafficPhase.SYNC_ROWS)]
        np.testing.assert_allclose(price[:, phase, link], curve.seconds_per_byte(size))


def test_what_can_run_beside_compute_is_exposed_beyond_it() -> None:
    problem, tiers = load(np.full(4, A)), np.array([0, 1, 2, 2], np.uint8)
    beside = Exposed(1.0, 0.5, 0.25)
    all_hidden = group_cost(problem, tiers, LAYOUT, cluster(latency=1e-6, exposed=beside))
    hidden = 0.5 * all_hidden.backward_seconds + 0.75 * all_hidden.sync_seconds
    for cover in (0.0, 0.25 * hidden, hidden, 2 * hidden):
        cost = group_cost(problem, tiers, LAYOUT, cluster(latency=1e-6, exposed=replace(beside, cover_seconds=cover)))
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
