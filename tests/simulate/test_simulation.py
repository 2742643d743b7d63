"""Replays: what they show of drift, that they repeat, and what they refuse; their figures and sentences name savings
and costs as what they are."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from flexd.core.errors import ConfigError
from flexd.core.keyspace import TableSpec
from flexd.core.placement import Placement, RankLayout
from flexd.planner.model.prices import EXCHANGE_PHASES, SYNC_PHASES, TrafficPhase
from flexd.planner.model.workload import TrainingShape
from flexd.planner.plan import make_plan
from flexd.simulate.accesses import Accesses, exact_profile, zipf_accesses
from flexd.simulate.byte_counter import MIGRATION, PHASES, CollectiveBytes
from flexd.simulate.simulation import (
    REPLANNED,
    TWO_HOP,
    Simulation,
    SimulationSettings,
    collective_seconds,
    simulate,
)
from flexd.simulate.summary import compared_steps, summarise
from flexd.topology.cluster import INTER, INTRA, Collective, CollectiveCurve, Link, WorldModel
from flexd.topology.files import load_preset, scale_model
from tests.support.planner_cases import ORIGIN

LAYOUT = RankLayout(2, 2)
ROW = TableSpec("rows", 1, 16, optimizer="rowwise_adagrad")
CLUSTER = scale_model(load_preset("azure-a100-200g"), 10_000)
STEPS = 40
SETTINGS = SimulationSettings(0.04, interval_steps=4, half_life_steps=6.0, horizon_steps=200.0)


def drifting(drift: float = 6.0, seed: int = 1, micro_batches: int = 1) -> Accesses:
    return zipf_accesses(
        LAYOUT, ROW, table_rows=2_000, exponent=1.05, drift_rows=drift,
        accesses_per_rank=3_000 // micro_batches, steps=STEPS, seed=seed, micro_batches=micro_batches,
    )  # fmt: skip


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return simulate(drifting(), LAYOUT, CLUSTER, SETTINGS)


def test_under_drift_re_planning_beats_one_plan_and_trails_the_oracle(simulation: Simulation) -> None:
    summary = summarise(simulation).model_dump(mode="json")
    json.dumps(summary, allow_nan=False)
    saved = {name: s["saved"] for name, s in summary["strategies"].items()}
    exposed = {name: figures["exposed_seconds"] for name, figures in saved.items()}
    assert exposed["oracle"] > exposed["replanned"] > max(0.0, 1.5 * exposed["static"])
    assert saved["replanned"]["critical_inter_node_bytes"] > saved["static"]["critical_inter_node_bytes"]
    assert summary["strategies"]["replanned"]["bytes"]["inter_node"]["migration"] > 0
    assert summary["strategies"]["oracle"]["bytes"]["inter_node"]["migration"] == 0
    assert any("re-planning saves" in line for line in summary["messages"])


def test_the_oracle_plans_for_the_passes_of_a_step() -> None:
    accesses = drifting(0.0, micro_batches=4)
    settings = replace(SETTINGS, replica_fraction=0.3)
    simulation = simulate(accesses, LAYOUT, CLUSTER, settings)
    window = [ranks for step in range(STEPS - settings.interval_steps, STEPS) for ranks in accesses.passes(step)]
    profile = exact_profile(window, accesses.keyspace, LAYOUT, 4)
    told, untold = (
        len(
            make_plan(
                profile, accesses.keyspace, LAYOUT, CLUSTER, settings.slots(accesses.keyspace), Placement.empty(),
                ORIGIN, horizon_steps=math.inf, shape=shape,
            ).target
        )
        for shape in (TrainingShape(micro_batches=4), TrainingShape())
    )  # fmt: skip
    assert simulation.runs["oracle"].replicated_rows[-1] == told != untold


def test_strategies_without_replicas_hold_none_and_their_order_is_that_of_their_bytes(simulation: Simulation) -> None:
    inter = {name: run.job_bytes(range(PHASES), INTER).mean() for name, run in simulation.runs.items()}
    assert inter["row_wise"] > inter["row_wise_dedup"] > inter["two_hop"]
    for name in ("row_wise", "row_wise_dedup", "two_hop"):
        assert not simulation.runs[name].replicated_rows.any()
        assert not simulation.runs[name].sent[:, :, [*SYNC_PHASES, MIGRATION]].any()


def test_plans_come_late_as_through_the_channel(simulation: Simulation) -> None:
    # Seen up to step t, planned in t + 1, applied at the start of t + 2.
    assert simulation.runs["static"].plan_steps == [STEPS // 4 + 1]
    assert simulation.runs["replanned"].plan_steps[0] == SETTINGS.interval_steps + 1
    assert not simulation.runs["replanned"].replicated_rows[: SETTINGS.interval_steps + 1].any()
    assert simulation.runs["oracle"].replicated_rows[0] > 0


def test_the_budget_is_kept(simulation: Simulation) -> None:
    # A NODE row takes one slot in the other node, so four ranks hold at most four times their slots.
    assert 0 < simulation.runs["replanned"].replicated_rows.max() <= 4 * SETTINGS.slots(simulation.accesses.keyspace)[0]


def test_a_replay_repeats_itself_bit_by_bit(simulation: Simulation) -> None:
    assert summarise(simulate(drifting(), LAYOUT, CLUSTER, SETTINGS)) == summarise(simulation)
    other = simulate(drifting(seed=2), LAYOUT, CLUSTER, SETTINGS, strategies=[TWO_HOP])
    assert (other.runs["two_hop"].sent != simulation.runs["two_hop"].sent).any()


def test_migrations_keep_to_the_cap_of_a_step() -> None:
    cap = 20 * (ROW.row_bytes + ROW.state_bytes)
    settings = SimulationSettings(
        0.08, interval_steps=10, half_life_steps=50.0, horizon_steps=200.0, chunk_rows=10, migration_bytes_per_step=cap
    )
    run = simulate(drifting(), LAYOUT, CLUSTER, settings, strategies=[REPLANNED]).runs["replanned"]
    assert run.migrated_rows.any()
    # Demotions copy nothing: they come on top of at most 20 promoted rows.
    assert np.diff(run.replicated_rows, prepend=0).max() == 20


@pytest.mark.parametrize(
    "change",
    [
        {"replica_fraction": -0.1}, {"interval_steps": 0}, {"half_life_steps": 0.0},
        {"horizon_steps": float("nan")}, {"chunk_rows": 0},
    ],
)  # fmt: skip
def test_settings_that_no_run_can_have(change: dict) -> None:
    with pytest.raises(ConfigError):
        SimulationSettings(**change)


BOTH_LINKS = CollectiveBytes(
    TrafficPhase.FORWARD_ROWS, Collective.ALL_TO_ALL, INTER, np.array([[5, 7], [1, 2]]) * 10**6,
    np.array([[6, 8], [0, 1]]) * 10**6,
)  # fmt: skip


def test_a_collective_takes_as_long_as_its_busiest_rank_on_its_slower_link() -> None:
    cluster = load_preset("azure-a100-200g")
    slow = cluster.curve(Link.INTER_NODE, Collective.ALL_TO_ALL)
    near = CollectiveBytes(
        TrafficPhase.FORWARD_IDS, Collective.ALL_TO_ALL, INTRA, np.zeros((2, 2), int), np.zeros((2, 2), int)
    )
    seconds = collective_seconds([near, near, BOTH_LINKS], cluster)
    assert seconds[TrafficPhase.FORWARD_ROWS] == pytest.approx(slow.latency_seconds + 8e6 / slow.bandwidth(8e6))
    latency = cluster.curve(Link.INTRA_NODE, Collective.ALL_TO_ALL).latency_seconds
    assert seconds[TrafficPhase.FORWARD_IDS] == pytest.approx(2 * latency)


def test_an_all_to_all_over_both_links_takes_the_time_of_the_one_over_all_ranks() -> None:
    world = CollectiveCurve(7e-5, ((1e6, 2e9),))
    cluster = replace(load_preset("azure-a100-200g"), world=WorldModel(2, 2, world))
    assert collective_seconds([BOTH_LINKS], cluster).sum() == pytest.approx(world.seconds(8e6))
    rail = replace(BOTH_LINKS, sent=BOTH_LINKS.sent * [0, 1], received=BOTH_LINKS.received * [0, 1])
    expected = cluster.curve(Link.INTER_NODE, Collective.ALL_TO_ALL).seconds(8e6)
    assert collective_seconds([rail], cluster).sum() == pytest.approx(expected)


def test_savings_are_against_the_two_hop_chain_over_the_last_quarter(simulation: Simulation) -> None:
    last, summary = slice(STEPS * 3 // 4, STEPS), summarise(simulation)
    assert compared_steps(STEPS) == last
    waited = {
        name: (run.exposed_seconds[last].mean(), run.job_bytes([*EXCHANGE_PHASES, MIGRATION], INTER)[last].mean())
        for name, run in simulation.runs.items()
    }
    for name, figures in summary.strategies.items():
        saved = figures.saved["exposed_seconds"], figures.saved["critical_inter_node_bytes"]
        assert saved == pytest.approx(np.subtract(waited["two_hop"], waited[name]))
    assert summary.drift["exposed_over_oracle"] == pytest.approx(waited["replanned"][0] / waited["oracle"][0])
    inter = {name: run.job_bytes(range(PHASES), INTER)[last].mean() for name, run in simulation.runs.items()}
    assert summary.drift["traffic_over_oracle"] == pytest.approx(inter["replanned"] / inter["oracle"])
    ranks = simulation.runs["replanned"].sent[last, :, :, INTER].sum(axis=(0, 2))
    assert summary.strategies["replanned"].busiest_rank_share == pytest.approx(ranks.max() / ranks.mean())
