"""Loads of every sharding type and pooling place, against the bytes that are counted for drawn ids."""

import numpy as np
import pytest

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.planner.model.prices import Exchange, TrafficPhase, byte_factors
from flexd.planner.model.workload import (
    ACCESSES,
    ANYWHERE,
    BACK_PER_NODE,
    BACK_PER_RANK,
    PER_NODE,
    PER_RANK,
    STATISTICS,
    SYNCED,
)
from flexd.planner.tables.costs import copy_loads, row_loads, sum_loads
from flexd.planner.tables.options import ShardingKind, TableWork
from flexd.simulate.accesses import StepPasses
from flexd.simulate.byte_counter import StepByteCounter, sent_bytes
from flexd.topology.cluster import INTER, INTRA
from tests.planner.tables.cases import work_of
from tests.support.planner_cases import bytes_of_bags

LAYOUTS = [RankLayout(3, 2), RankLayout(1, 4), RankLayout(4, 1)]
ROWS, BAGS, LENGTH, DIM = 600, 200, 5, 8


def drawn(layout: RankLayout) -> tuple[TableWork, list[np.ndarray]]:
    rng = np.random.default_rng(1)
    bags = [rng.integers(0, ROWS, (BAGS, LENGTH)) for _ in range(layout.world_size)]
    statistics = np.zeros((1, STATISTICS))
    statistics[0, ACCESSES] = BAGS * LENGTH
    by_node = [np.concatenate([bags[rank] for rank in layout.node_ranks(node)]) for node in range(layout.nodes)]
    for statistic, parts in ((PER_RANK, bags), (PER_NODE, by_node), (ANYWHERE, [np.concatenate(bags)])):
        statistics[0, statistic] = np.mean([len(np.unique(part)) for part in parts])
    statistics[0, BACK_PER_RANK], statistics[0, BACK_PER_NODE] = statistics[0, PER_RANK], statistics[0, PER_NODE]
    one = np.ones(1)
    return TableWork(("t",), statistics, BAGS * one, 2 * DIM * one, 4 * DIM * one, 4 * one, ROWS * one, one, 4), bags


def counted(bags: list[np.ndarray], sharding: str, layout: RankLayout, *, sums: bool) -> np.ndarray:
    """int64[message, link, W] sent for one table of rows with 2 DIM bytes."""
    keyspace, none = KeySpace([TableSpec("t", ROWS, DIM, "float16", sharding=sharding)]), np.empty(0, np.int64)
    if sums:
        lengths = np.full(BAGS, LENGTH)
        found = bytes_of_bags(keyspace, layout, [[(ids.ravel(), lengths)] for ids in bags], Exchange.CHAIN)
    else:
        counter = StepByteCounter(keyspace, layout)
        rows, sizes = (
            sent_bytes(counter.step(step, Placement.empty(), Exchange.CHAIN), layout.world_size)
            for step in (StepPasses.of([[of(ids) for ids in bags]], layout) for of in (np.ravel, lambda _: none))
        )
        found = (rows - sizes)[:, :3]
    return found.transpose(1, 2, 0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rule", [ShardingKind.ROW_WISE, ShardingKind.TABLE_ROW_WISE, ShardingKind.TABLE_WISE], ids=str)
@pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])
def test_loads_are_those_of_drawn_ids(layout, rule, sums):
    work, bags = drawn(layout)
    rank = np.arange(layout.world_size)
    place = 1 % layout.nodes if rule is ShardingKind.TABLE_ROW_WISE else layout.world_size - 1
    node, local = (place, 0) if rule is ShardingKind.TABLE_ROW_WISE else divmod(place, layout.local_ranks)
    at, on = rank // layout.local_ranks == node, rank % layout.local_ranks == local
    parts = (sum_loads if sums else row_loads)(work, layout, rule)[0]
    predicted = (parts.T @ np.stack([rank >= 0, at, on, at & on])).reshape(3, 2, 2, -1)[:, :, 0]
    sent = counted(bags, rule if rule is ShardingKind.ROW_WISE else f"{rule}:{place}", layout, sums=sums)
    scale = np.maximum(sent.max(axis=2, keepdims=True), 1)
    np.testing.assert_allclose(predicted / scale, sent / scale, atol=0.12)
    # Only rules that spread rows are left to chance.
    np.testing.assert_allclose(predicted.sum(axis=2), sent.sum(axis=2), rtol=0.03, atol=1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tables_that_every_rank_has_cost_what_plans_say_of_rows_at_device(layout):
    work = work_of(0, 4, layout)
    statistics = work.statistics.copy()
    statistics[:, SYNCED] = work.rows
    loads = copy_loads(work, layout)
    assert not loads[:, 1:].any()
    with_rows, summed = loads[:, 0, :12].reshape(4, 3, 2, 2), loads[:, 0, 12:].reshape(4, 2, 2)
    for table in range(4):
        bytes_ = byte_factors(layout, int(work.wire_bytes[table]), Exchange.CHAIN)[Tier.DEVICE] @ statistics[table]
        for link in (INTRA, INTER):
            for direction in (0, 1):
                bits = with_rows[table, :2, link, direction].sum()
                assert bits == pytest.approx(bytes_[TrafficPhase.SYNC_MASK, link])
                assert with_rows[table, 2, link, direction] == pytest.approx(bytes_[TrafficPhase.BACKWARD_ROWS, link])
                sums = bytes_[TrafficPhase.SYNC_SUMS, link] + bytes_[TrafficPhase.SYNC_ROWS, link]
                assert summed[table, link, direction] == pytest.approx(sums)
