"""What reports of ranks say about the curves of the cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase
from flexd.core.layout import RankLayout
from flexd.operations.live_prices import price_samples
from flexd.topology.cluster import Cluster, Link, WorldModel
from tests.support.planner_cases import cluster, flat

LAYOUT = RankLayout(2, 2)
MACHINE = cluster(all_to_all=1e9, all_reduce=2e9, intra=10e9, latency=1e-4)


def with_world(machine: Cluster) -> Cluster:
    return replace(machine, world=WorldModel(2, 2, flat(0.5e9, 3e-4)))


def values(phase: StepPhase, **quantities: list[float]) -> np.ndarray:
    """One quantity of one phase by rank."""
    result = np.zeros((4, len(StepPhase), len(PHASE_QUANTITIES)))
    for name, by_rank in quantities.items():
        result[:, list(StepPhase).index(phase), PHASE_QUANTITIES.index(name)] = by_rank
    return result


ROWS = values(
    StepPhase.ROWS, inter_seconds=[0.5, 0.2, 0.1, 0.6], inter_bytes=[4e6, 1e6, 2e6, 3e6], inter_collectives=[1] * 4,
    intra_seconds=[0.02, 0.03, 0.05, 0.04], intra_bytes=[1e6, 2e6, 3e6, 3e6], intra_collectives=[1] * 4,
)  # fmt: skip


def test_a_collective_takes_as_long_as_for_the_rank_that_waits_least() -> None:
    found = price_samples(ROWS, LAYOUT, MACHINE, "chain")
    # Rails are ranks 0, 2 and 1, 3; the busiest of each sends 4 and 3 MB. Nodes are ranks 0, 1 and 2, 3.
    assert found[Link.INTER_NODE] == pytest.approx((1e-4 + 3.5e6 / 1e9, (0.1 + 0.2) / 2))
    assert found[Link.INTRA_NODE] == pytest.approx((1e-4 + 2.5e6 / 10e9, (0.02 + 0.04) / 2))
    assert set(price_samples(ROWS[:2], RankLayout(2, 1), MACHINE, "chain")) == {Link.INTER_NODE}
    assert set(price_samples(ROWS, RankLayout(1, 4), MACHINE, "chain")) == {Link.INTRA_NODE}


def test_a_direct_exchange_shows_the_world() -> None:
    over_all = price_samples(ROWS, LAYOUT, with_world(MACHINE), "direct")
    assert over_all == {Link.INTER_NODE: pytest.approx((3e-4 + 4e6 / 0.5e9, 0.1))}
    rail = price_samples(ROWS, LAYOUT, MACHINE, "direct")
    assert rail[Link.INTER_NODE][0] == pytest.approx(1e-4 + 4e6 / 1e9)
    one_node = price_samples(ROWS, RankLayout(1, 4), MACHINE, "direct")
    assert one_node[Link.INTRA_NODE][1] == pytest.approx(0.02)
