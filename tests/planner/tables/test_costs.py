"""Loads of every sharding type and pooling place, against ids that are drawn and walked through the hops one by one."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.placement import RankLayout, Tier
from flexd.planner.model.prices import ID_BYTES, Exchange, TrafficPhase, byte_factors
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
from flexd.topology.cluster import INTER, INTRA
from tests.planner.tables.cases import work_of

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


def home_of(rows: np.ndarray, rule: ShardingKind, place: int, layout: RankLayout) -> np.ndarray:
    if rule is ShardingKind.ROW_WISE:
        return rows % layout.world_size
    if rule is ShardingKind.TABLE_ROW_WISE:
        return place * layout.local_ranks + rows % layout.local_ranks
    return np.full_like(rows, place)


def walked(bags: list[np.ndarray], rule: ShardingKind, place: int, layout: RankLayout, *, sums: bool) -> np.ndarray:
    """float64[message, link, direction, W] of one table of rows with 2 DIM bytes."""
    result = np.zeros((3, 2, 2, layout.world_size))

    def hop(link: int, source: int, target: int, ids: float, vectors: float) -> None:
        if source == target:
            return
        for message, size, forward in ((0, ids, True), (1, vectors, False), (2, vectors, True)):
            result[message, link, 0, source if forward else target] += size
            result[message, link, 1, target if forward else source] += size

    local = layout.local_ranks
    if not sums:
        wanted: dict[int, list[np.ndarray]] = {rank: [] for rank in range(layout.world_size)}
        for rank, of_rank in enumerate(bags):
            rows = np.unique(of_rank)
            home = home_of(rows, rule, place, layout)
            for station_local in range(local):
                station = layout.rank_of(layout.node_of(rank), station_local)
                mine = rows[home % local == station_local]
                hop(INTRA, rank, station, ID_BYTES * len(mine), 2 * DIM * len(mine))
                wanted[station].append(mine)
        for station, parts in wanted.items():
            rows = np.unique(np.concatenate(parts))
            for target, count in zip(*np.unique(home_of(rows, rule, place, layout), return_counts=True), strict=True):
                hop(INTER, station, int(target), ID_BYTES * count, 2 * DIM * count)
        return result
    for rank, of_rank in enumerate(bags):
        home = home_of(of_rank, rule, place, layout)
        for node in range(layout.nodes):
            there = home // local == node
            station = layout.rank_of(node, layout.local_rank_of(rank))
            hop(INTER, rank, station, 4 * there.sum(), 2 * DIM * there.any(axis=1).sum())
            for target in layout.node_ranks(node):
                at = home == target
                hop(INTRA, station, target, 4 * at.sum(), 2 * DIM * at.any(axis=1).sum())
    return result


def placed(parts: np.ndarray, rule: ShardingKind, place: int, layout: RankLayout) -> np.ndarray:
    """float64[axes, W] of float64[4, axes]."""
    rank = np.arange(layout.world_size)
    node, rail = rank // layout.local_ranks, rank % layout.local_ranks
    total = np.repeat(parts[0][:, None], layout.world_size, axis=1)
    if rule is ShardingKind.TABLE_ROW_WISE:
        total += parts[1][:, None] * (node == place)
    elif rule is ShardingKind.TABLE_WISE:
        total += parts[1][:, None] * (node == place // layout.local_ranks)
        total += parts[2][:, None] * (rail == place % layout.local_ranks) + parts[3][:, None] * (rank == place)
    return total


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rule", [ShardingKind.ROW_WISE, ShardingKind.TABLE_ROW_WISE, ShardingKind.TABLE_WISE], ids=str)
@pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])
def test_loads_are_those_of_drawn_ids(layout, rule, sums):
    work, bags = drawn(layout)
    place = (
        0
        if rule is ShardingKind.ROW_WISE
        else 1 % layout.nodes
        if rule is ShardingKind.TABLE_ROW_WISE
        else layout.world_size - 1
    )
    predicted = placed((sum_loads if sums else row_loads)(work, layout, rule)[0], rule, place, layout)
    counted = walked(bags, rule, place, layout, sums=sums).reshape(12, -1)
    scale = counted.max(axis=1, keepdims=True)
    np.testing.assert_allclose(predicted / np.maximum(scale, 1), counted / np.maximum(scale, 1), atol=0.12)
    # Only rules that spread rows are left to chance.
    np.testing.assert_allclose(predicted.sum(axis=1), counted.sum(axis=1), rtol=0.03, atol=1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tables_that_every_rank_has_cost_what_plans_say_of_rows_at_device(layout):
    work = work_of(0, 4, layout)
    statistics = work.statistics.copy()
    statistics[:, SYNCED] = work.rows
    loads = copy_loads(work, layout)
    assert not loads[:, 1:].any()
    with_rows, summed = loads[:, 0, :12].reshape(4, 3, 2, 2), loads[:, 0, 12:].reshape(4, 2, 2)
    for table in range(4):
        factors = byte_factors(layout, int(work.wire_bytes[table]), Exchange.CHAIN)[Tier.DEVICE]
        bytes_ = factors @ statistics[table]
        for link in (INTRA, INTER):
            for direction in (0, 1):
                bits = with_rows[table, :2, link, direction].sum()
                assert bits == pytest.approx(bytes_[TrafficPhase.SYNC_MASK, link])
                assert with_rows[table, 2, link, direction] == pytest.approx(bytes_[TrafficPhase.BACKWARD_ROWS, link])
                sums = bytes_[TrafficPhase.SYNC_SUMS, link] + bytes_[TrafficPhase.SYNC_ROWS, link]
                assert summed[table, link, direction] == pytest.approx(sums)
