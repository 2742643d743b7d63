"""Properties that every strategy by row must have, and RecShard's split."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.topology.cluster import CollectiveCurve, WorldModel
from tests.support.planner_cases import cluster, profile
from tools.bench.peers.problem import PlanningProblem
from tools.bench.peers.recshard import RECSHARD

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
