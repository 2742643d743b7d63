"""Properties that every strategy by row must have, and RecShard's split."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.planner.model.row_bytes import Phase, TrafficLink
from flexd.planner.model.training_shape import TrainingShape
from flexd.topology.cluster import CollectiveCurve, WorldModel
from tests.support.planner_cases import cluster, profile
from tools.bench.peers.problem import PlanningProblem
from tools.bench.peers.recshard import RECSHARD
from tools.bench.peers.row_peers import ROW_PEERS, FlexShard, RowWise

KEYSPACE = KeySpace(
    [
        TableSpec("items", 3000, 64),
        TableSpec("users", 2000, 64),
        TableSpec("tags", 500, 32, optimizer="rowwise_adagrad"),
        TableSpec("shops", 900, 32, optimizer="rowwise_adagrad"),
        TableSpec("words", 1200, 96),
    ]
)
LAYOUTS = [RankLayout(2, 2), RankLayout(3, 2), RankLayout(1, 4), RankLayout(4, 1)]


def case(layout: RankLayout = LAYOUTS[0], **changes: object) -> PlanningProblem:
    given = PlanningProblem(
        profile(KEYSPACE, 4000.0, hot=300), KEYSPACE, layout, cluster(latency=1e-6), 1e9, (60, 30, 20)
    )
    return dataclasses.replace(given, **changes)  # type: ignore[arg-type]


def test_peers_are_priced_with_the_curves_of_the_layout() -> None:
    other = WorldModel(8, 8, CollectiveCurve(1.0, ((1.0, 1.0),)))
    assert case(cluster=dataclasses.replace(cluster(), world=other)).cluster == cluster()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.nodes}x{layout.local_ranks}")
@pytest.mark.parametrize("peer", ROW_PEERS, ids=lambda peer: peer.name)
def test_an_outcome_is_whole(peer: FlexShard | RowWise, layout: RankLayout) -> None:
    problem = case(layout)
    outcome = peer.evaluate(problem)
    assert outcome.name == peer.name
    assert outcome.source
    assert outcome.not_applicable == ""
    cost = outcome.cost
    assert cost is not None
    assert (cost.bytes >= 0).all()
    busiest, mean = (sent[..., 1:].sum(axis=0) for sent in (cost.peak_bytes, cost.bytes))
    assert (busiest >= mean * (1 - 1e-9) - 1e-9).all()
    assert 0 < cost.exposed_seconds <= outcome.predicted_seconds * (1 + 1e-12)
    assert outcome.balance >= 1 - 1e-12
    if layout.nodes == 1:
        assert cost.bytes[..., TrafficLink.INTER_NODE].sum() == 0
    if layout.local_ranks == 1:
        assert cost.bytes[..., TrafficLink.INTRA_NODE].sum() == pytest.approx(0, abs=1e-9)
    assert len(outcome.memory_bytes) == layout.world_size
    assert outcome.memory_bytes.max() <= problem.memory_bytes
    held = outcome.memory_bytes.sum()
    assert held >= problem.table_bytes.sum() * (1 - 1e-9), "every row is somewhere"
    again = peer.evaluate(problem)
    assert again.predicted_seconds == outcome.predicted_seconds


@pytest.mark.parametrize("peer", ROW_PEERS, ids=lambda peer: peer.name)
def test_what_does_not_fit_is_an_outcome_with_a_reason(peer: FlexShard | RowWise) -> None:
    outcome = peer.evaluate(case(memory_bytes=1e3))
    assert outcome.cost is None
    assert "GB" in outcome.not_applicable
    assert np.isnan(outcome.predicted_seconds)


@pytest.mark.parametrize("peer", ROW_PEERS, ids=lambda peer: peer.name)
def test_frozen_tables_cost_less_and_send_nothing_back(peer: FlexShard | RowWise) -> None:
    frozen = TrainingShape(frozen_tables=frozenset(KEYSPACE.index))
    trained, read_only = peer.evaluate(case()).cost, peer.evaluate(case(shape=frozen)).cost
    assert trained is not None
    assert read_only is not None
    assert read_only.bytes[:, [Phase.BACKWARD_ROWS, Phase.SYNC_MASK, Phase.SYNC_ROWS]].sum() == 0
    assert read_only.exposed_seconds < trained.exposed_seconds


@pytest.mark.parametrize("peer", ROW_PEERS, ids=lambda peer: peer.name)
def test_halves_on_the_wire(peer: FlexShard | RowWise) -> None:
    full = peer.evaluate(case()).cost
    half = peer.evaluate(case(shape=TrainingShape(comm_dtype="float16"))).cost
    assert full is not None
    assert half is not None
    if not peer.name.startswith("flexshard"):  # other tiers may pay then
        assert half.bytes[:, Phase.FORWARD_ROWS].sum() == pytest.approx(full.bytes[:, Phase.FORWARD_ROWS].sum() / 2)
    assert half.exposed_seconds < full.exposed_seconds


def test_names_and_sources_are_told_apart() -> None:
    assert len({peer.name for peer in ROW_PEERS}) == len(ROW_PEERS)
    assert all(peer.source for peer in ROW_PEERS)


def test_flexshard_is_between_row_wise_and_what_dedup_can_do_and_keeps_its_caps() -> None:
    outcomes = {peer.name: peer.evaluate(case(RankLayout(3, 2))) for peer in ROW_PEERS}
    whole, slots = outcomes["flexshard"], outcomes["flexshard_slots"]
    assert whole.predicted_seconds < slots.predicted_seconds < outcomes["row_wise"].predicted_seconds
    assert whole.figures["memory_cap_bytes"] == case().memory_bytes
    for each in (whole, slots):
        assert each.memory_bytes.max() <= each.figures["memory_cap_bytes"] * (1 + 1e-9)
        assert each.figures["device_rows"] + each.figures["node_rows"] > 0


def test_a_pipeline_hides_the_requests_and_nothing_else() -> None:
    outcomes = {peer.name: peer.evaluate(case()) for peer in ROW_PEERS}
    plain, pipelined = outcomes["row_wise_dedup"].cost, outcomes["row_wise_dedup_pipelined"].cost
    assert plain is not None
    assert pipelined is not None
    requests = plain.peak_transfer_seconds[:, Phase.FORWARD_IDS].sum() + plain.latency_seconds[Phase.FORWARD_IDS].sum()
    assert requests > 0
    assert pipelined.peak_exposed_seconds == pytest.approx(plain.peak_exposed_seconds - requests)
    assert (pipelined.bytes == plain.bytes).all()


def test_recshard_keeps_hot_rows_in_fast_memory() -> None:
    roomy, tight = (RECSHARD.place(case(memory_bytes=memory)) for memory in (1e9, 1e5))
    assert roomy is not None
    assert tight is not None
    assert roomy.fast_share == pytest.approx(1.0)
    assert 0.3 < float(tight.fast_share.mean()) < 1.0
    row = case().table_bytes / np.array([spec.rows for spec in KEYSPACE.tables])
    assert np.bincount(tight.rank, weights=tight.fast_rows * row).max() <= 1e5
    assert tight.gap <= 1e-2


@pytest.mark.parametrize("changes", [{"memory_bytes": 0.0}, {"memory_bytes": float("nan")}, {"replica_slots": (1,)}])
def test_bad_cases(changes: dict) -> None:
    with pytest.raises(PlanError):
        case(**changes)
