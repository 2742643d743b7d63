"""Touches are measured where known, fitted to the measured rows elsewhere, and independent without any."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout
from flexd.planner.model.prices import EXCHANGE_PHASES, SYNC_PHASES, Exchange
from flexd.planner.model.workload import (
    ANYWHERE,
    PER_NODE,
    PER_RANK,
    GroupLoad,
    TouchRelation,
    TrainingShape,
    bounded,
    make_loads,
    measured_touches,
    rescaled,
)
from flexd.planner.plan import placement_cost
from flexd.simulate.accesses import StepPasses, exact_profile
from flexd.simulate.byte_counter import StepByteCounter, sent_bytes
from flexd.sketch.profile import Profile
from flexd.topology.cluster import INTER, INTRA
from flexd.topology.files import load_preset

LAYOUT = RankLayout(2, 3)
ROWS = 400
KEYSPACE = KeySpace([TableSpec("t", ROWS, 128)])


def bursty_steps(steps: int = 30) -> list[list[np.ndarray]]:
    """Each step's ranks draw from the step's own few rows, several times each: far from independent."""
    rng = np.random.default_rng(3)
    popularity = np.arange(1, ROWS + 1) ** -0.8
    popularity /= popularity.sum()
    made = []
    for _ in range(steps):
        of_step = rng.choice(ROWS, 40, p=popularity)
        made.append([np.repeat(rng.choice(of_step, 25), 2) for _ in range(LAYOUT.world_size)])
    return made


def without_touches(profile: Profile) -> Profile:
    return replace(profile, tables=tuple(replace(table, touches=None) for table in profile.tables))


def load_of(profile: Profile, shape: TrainingShape | None = None) -> GroupLoad:
    return make_loads(profile, KEYSPACE, LAYOUT, shape)[0]


def assert_possible(touches: np.ndarray) -> None:
    rank, node, anywhere = touches
    assert (rank >= 0).all()
    assert (anywhere <= 1).all()
    assert (rank <= node).all()
    assert (node <= anywhere).all()
    assert (node <= LAYOUT.local_ranks * rank * (1 + 1e-12)).all()
    assert (anywhere <= LAYOUT.nodes * node * (1 + 1e-12)).all()


@pytest.mark.parametrize("device", [0, 60])
@pytest.mark.parametrize("node", [0, 100])
def test_bytes_of_bursty_batches_are_predicted(device: int, node: int) -> None:
    steps = bursty_steps()
    profile = exact_profile(steps, KEYSPACE, LAYOUT)
    hottest = profile.tables[0].hot_rows[: device + node]
    placement = Placement.of(hottest, np.repeat(np.array([2, 1], np.uint8), [device, node]), 0)
    counter = StepByteCounter(KEYSPACE, LAYOUT)
    sent = sum(
        sent_bytes(counter.step(step, placement, Exchange.CHAIN), LAYOUT.world_size).mean(axis=0)
        for step in (StepPasses.of([keys], LAYOUT) for keys in steps)
    ) / len(steps)
    cluster = load_preset("azure-a100-200g")

    def over_measured(of: Profile, link: int) -> float:
        cost = placement_cost(make_loads(of, KEYSPACE, LAYOUT), placement, KEYSPACE, cluster)
        return (cost.all_to_all_bytes(link) + cost.sync_bytes(link)) / float(
            sent[[*EXCHANGE_PHASES, *SYNC_PHASES], link].sum()
        )

    for link in (INTRA, INTER):
        assert over_measured(profile, link) == pytest.approx(1, abs=0.03)
        assert over_measured(without_touches(profile), link) > 1.15


def test_unlisted_rows_follow_the_relation_of_the_listed_ones() -> None:
    profile = exact_profile(bursty_steps(200), KEYSPACE, LAYOUT)
    (table,) = profile.tables
    assert table.touches is not None
    known = np.arange(len(table.hot_rows)) % 2 == 0
    columns = [np.where(known, column, np.nan) for column in (
        table.touches.per_rank, table.touches.per_node, table.touches.anywhere)]  # fmt: skip
    half = replace(table, touches=replace(
        table.touches, per_rank=columns[0], per_node=columns[1], anywhere=columns[2]))  # fmt: skip
    true, fitted = (load_of(Profile((each,))).statistics for each in (table, half))
    for statistic in (PER_RANK, PER_NODE, ANYWHERE):
        assert fitted[statistic].sum() == pytest.approx(true[statistic].sum(), rel=0.02)
    tail = replace(
        half, hot_rows=table.hot_rows[:200], hot_share=table.hot_share[:200],
        bin_share=table.hot_share[200:],
        bin_rows=np.ones(len(table.hot_rows) - 200),
        touches=replace(table.touches, **{name: getattr(table.touches, name)[:200] for name in (
            "per_rank", "per_node", "anywhere")}),
    )  # fmt: skip
    load = load_of(Profile((tail,)))
    assert load.bins.touches is not None
    assert_possible(load.bins.touches)
    mean = load._tail_statistics
    assert mean[PER_RANK] == pytest.approx(load.bins.touches[0].mean(), rel=1e-9)


def test_touches_stay_possible_whatever_is_measured() -> None:
    rng = np.random.default_rng(5)
    accesses = 10.0 ** rng.uniform(-6, 2, 500)
    measured = rng.random((3, 500))
    measured[rng.random((3, 500)) < 0.3] = np.nan
    relation = TouchRelation.fit(accesses, measured, LAYOUT)
    at = np.sort(10.0 ** rng.uniform(-8, 3, 500))
    for touches in (
        relation.completed(accesses, measured),
        relation.touches(at),
        rescaled(relation.completed(accesses, measured), accesses, 3 * accesses, LAYOUT),
        bounded(np.nan_to_num(measured), accesses, LAYOUT),
    ):
        assert_possible(touches)
        assert np.isfinite(touches).all()
    assert (relation.touches(accesses)[0] <= accesses).all()


def test_touches_of_batches_of_another_size_are_not_used():
    table = exact_profile(bursty_steps(), KEYSPACE, LAYOUT).tables[0]
    assert table.touches is not None
    table = replace(table, touches=replace(table.touches, accesses=50.0))
    taken = measured_touches(table, LAYOUT, 50.0)
    np.testing.assert_allclose(taken[0], table.touches.per_rank)
    assert (measured_touches(table, LAYOUT, 55.0) >= taken).all()
    assert measured_touches(table, LAYOUT, 100.0) is None
    assert measured_touches(table, LAYOUT, 25.0) is None
