"""What reports of ranks say about the curves of the cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase
from flexd.core.layout import RankLayout
from flexd.operations.price_samples import PricedCurve, corrected_cluster, price_samples
from flexd.topology.cluster import Cluster, Collective, Link, WorldModel
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
    found = price_samples(ROWS, LAYOUT, MACHINE, "chain", all_reduces=True)
    rail = found[PricedCurve.INTER_ALL_TO_ALL]
    # Rails are ranks 0, 2 and 1, 3; the busiest of each sends 4 and 3 MB.
    assert rail.measured_seconds == pytest.approx([0, (0.1 + 0.2) / 2, 0])
    assert rail.transfer_seconds == pytest.approx([0, 3.5e6 / 1e9, 0])
    assert rail.latency_seconds == pytest.approx([0, 1e-4, 0])
    node = found[PricedCurve.INTRA_ALL_TO_ALL]
    # Nodes are ranks 0, 1 and 2, 3; the last entry is the sums of copies.
    assert node.measured_seconds == pytest.approx([0, (0.02 + 0.04) / 2, 0, 0])
    assert node.transfer_seconds == pytest.approx([0, 2.5e6 / 10e9, 0, 0])
    assert set(found) == {PricedCurve.INTER_ALL_TO_ALL, PricedCurve.INTRA_ALL_TO_ALL}


def test_a_direct_exchange_shows_the_world() -> None:
    over_all = price_samples(ROWS, LAYOUT, with_world(MACHINE), "direct", all_reduces=True)
    assert set(over_all) == {PricedCurve.WORLD_ALL_TO_ALL}
    sample = over_all[PricedCurve.WORLD_ALL_TO_ALL]
    assert sample.measured_seconds[1] == pytest.approx(0.1)
    assert sample.transfer_seconds[1] == pytest.approx(4e6 / 0.5e9)
    assert sample.latency_seconds[1] == pytest.approx(3e-4)
    rail = price_samples(ROWS, LAYOUT, MACHINE, "direct_no_dedup", all_reduces=True)
    assert rail[PricedCurve.INTER_ALL_TO_ALL].transfer_seconds[1] == pytest.approx(4e6 / 1e9)
    one_node = price_samples(ROWS, RankLayout(1, 4), MACHINE, "direct", all_reduces=True)
    assert one_node[PricedCurve.INTRA_ALL_TO_ALL].measured_seconds[1] == pytest.approx(0.02)


def test_sums_of_copies_show_the_all_reduce_where_they_are_one() -> None:
    sums = values(StepPhase.SYNC, inter_seconds=[0.3] * 4, inter_bytes=[4e6] * 4, inter_collectives=[1] * 4)
    found = price_samples(sums, LAYOUT, MACHINE, "chain", all_reduces=True)[PricedCurve.INTER_ALL_REDUCE]
    assert (found.measured_seconds[0], found.transfer_seconds[0]) == pytest.approx((0.3, 4e6 / 2e9))
    assert PricedCurve.INTER_ALL_REDUCE not in price_samples(sums, LAYOUT, MACHINE, "chain", all_reduces=False)
    more = values(StepPhase.SYNC, inter_seconds=[0.3] * 4, inter_bytes=[4e6] * 4, inter_collectives=[3] * 4)
    assert PricedCurve.INTER_ALL_REDUCE not in price_samples(more, LAYOUT, MACHINE, "chain", all_reduces=True)


def test_collectives_that_steps_did_not_show_take_the_factors_of_their_link() -> None:
    machine = with_world(MACHINE)
    changed = corrected_cluster(machine, {PricedCurve.INTER_ALL_TO_ALL: (1.0, 4.0)})
    for collective in Collective:
        before, after = (of.curve(Link.INTER_NODE, collective) for of in (machine, changed))
        assert after.seconds_per_byte(1e6) == pytest.approx(4 * before.seconds_per_byte(1e6))
        assert after.latency_seconds == before.latency_seconds
        assert changed.curve(Link.INTRA_NODE, collective) == machine.curve(Link.INTRA_NODE, collective)
    assert machine.world is not None
    assert changed.world is not None
    assert changed.world.all_to_all.bandwidth(1e6) == pytest.approx(machine.world.all_to_all.bandwidth(1e6) / 4)


def test_a_collective_that_steps_showed_has_its_own_factors() -> None:
    machine = with_world(MACHINE)
    factors = {PricedCurve.WORLD_ALL_TO_ALL: (2.0, 3.0), PricedCurve.INTER_ALL_REDUCE: (1.0, 1.0)}
    changed = corrected_cluster(machine, factors)
    rail, reduce = (changed.curve(Link.INTER_NODE, c) for c in (Collective.ALL_TO_ALL, Collective.ALL_REDUCE))
    assert rail.latency_seconds == pytest.approx(2e-4), "the world's: what changed is the link"
    assert reduce == machine.curve(Link.INTER_NODE, Collective.ALL_REDUCE)
    assert corrected_cluster(machine, {}) is machine
