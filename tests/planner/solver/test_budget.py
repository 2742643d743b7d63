"""Memory for copies goes to the rows of all dim-groups that save most time per byte."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.planner.model.cost import row_seconds
from flexd.planner.model.workload import TrainingShape
from flexd.planner.plan import Plan, copies_bytes, make_plan
from flexd.planner.solver.assign import FREE, GroupLimits
from flexd.planner.solver.budget import CopyMemory
from flexd.planner.solver.tiers import choose_jointly
from tests.support.planner_cases import ORIGIN, cluster, load, profile

LAYOUT = RankLayout(2, 2)


def most_gained(loads: list, sizes: tuple[int, ...], memory: int) -> float:
    """The most that any copies within the memory of every rank gain: HiGHS, exact."""
    values, held, once = [], [], []
    for number, (each, size) in enumerate(zip(loads, sizes, strict=True)):
        factors = row_seconds(each, cluster(), np.zeros((3, 6, 2)))
        gains = (factors[Tier.HOME] - factors) @ each.statistics
        for tier in (Tier.NODE, Tier.DEVICE):
            values.append(gains[tier])
            tiers = np.full(len(each.keys), tier, np.uint8)
            held.append(size * np.stack([LAYOUT.holds_replica(rank, each.keys, tiers) for rank in range(4)]))
            rows = np.zeros((sum(len(load.keys) for load in loads), len(each.keys)))
            rows[
                sum(len(load.keys) for load in loads[:number]) + np.arange(len(each.keys)), np.arange(len(each.keys))
            ] = 1
            once.append(rows)
    value = np.concatenate(values)
    scale = 1e5 / np.abs(value).max()
    found = milp(
        -value * scale, integrality=np.ones(len(value)), bounds=Bounds(0, 1), options={"mip_rel_gap": 1e-6},
        constraints=[
            LinearConstraint(np.concatenate(held, axis=1), ub=memory),
            LinearConstraint(np.concatenate(once, axis=1), ub=1),
        ],
    )  # fmt: skip
    assert found.success
    return float(value @ np.round(found.x))


@pytest.mark.parametrize("memory", [1_000, 8_000, 30_000])
@pytest.mark.parametrize("state", [0, 64])
def test_a_byte_saves_the_same_time_in_every_dim_group(memory: int, state: int) -> None:
    rng = np.random.default_rng(memory + state)
    loads = []
    for number, row_bytes in enumerate((32, 64, 256)):
        keys = np.sort(rng.choice(1000, 120, replace=False)).astype(np.int64) + 1000 * number
        # The first is read only: its copies are never synchronised.
        made = load(rng.pareto(1.0, 120), keys, row_bytes=row_bytes, trained=np.zeros(120) if number == 0 else None)
        loads.append(replace(made, group=number))
    sizes = (32, 64 + state, 256 + state)
    limits = [GroupLimits(np.full(4, 10**6), np.full(120, FREE, np.uint8)) for _ in loads]
    live = [np.zeros(120, np.uint8) for _ in loads]
    choice = choose_jointly(loads, cluster(), limits, live, np.inf, memory=CopyMemory(memory, sizes))
    used = sum(
        size * LAYOUT.replica_slots_used(each.keys, tiers)
        for each, tiers, size in zip(loads, choice.tiers, sizes, strict=True)
    )
    assert (used <= memory).all()
    best, ours = most_gained(loads, sizes, memory), choice.optimum.home_seconds - choice.cost.exposed_seconds
    assert best * (0.85 if memory == 1_000 else 0.97) <= ours <= best * (1 + 1e-5)
    assert choice.optimum.home_seconds - choice.optimum.lower_bound_seconds >= best * (1 - 1e-5)
    twice = choose_jointly(loads, cluster(), limits, live, np.inf, memory=CopyMemory(2 * memory, sizes))
    saved = choice.cost.exposed_seconds - twice.cost.exposed_seconds
    assert choice.twice_saves_seconds == pytest.approx(saved, rel=0.08, abs=1e-3 * best)


KEYSPACE = KeySpace(
    [TableSpec("items", 4000, 16, optimizer="adam"), TableSpec("content", 4000, 16, optimizer="adam")], ["content"]
)


def planned(memory: int | None, slots: int = 4000) -> Plan:
    room = KEYSPACE.room_for_copies([slots])
    return make_plan(
        profile(KEYSPACE, 20_000.0, hot=4000), KEYSPACE, LAYOUT, cluster(), room, Placement.empty(), ORIGIN,
        horizon_steps=1e9, shape=TrainingShape(frozen_tables=frozenset({"content"})), copies_memory_bytes=memory,
    )  # fmt: skip


def test_a_read_only_row_takes_no_memory_of_optimizer_state() -> None:
    assert KEYSPACE.copy_bytes == (3 * 64, 64)
    made = planned(60_000)
    assert made.memory.used_bytes == copies_bytes(made.target, KEYSPACE, LAYOUT) <= 60_000
    assert made.memory.used_bytes > 0.97 * 60_000
    assert made.memory.twice_saves_seconds == pytest.approx(
        made.costs.after.exposed_seconds - planned(120_000).costs.after.exposed_seconds, rel=1e-6
    )
    # A third of the bytes, and no synchronisation: copies of read-only rows come first.
    tables = KEYSPACE.table_of(made.target.keys)
    assert np.count_nonzero(tables == 1) > 3 * np.count_nonzero(tables == 0)
    enough = planned(10**6)
    assert enough.memory.used_bytes < 10**6
    assert enough.memory.twice_saves_seconds == 0
    assert len(planned(0).target) == 0


def test_a_hot_read_only_table_is_whole_on_every_rank_where_it_fits() -> None:
    """Rows that the profile does not list are copied too, so that no look-up of the table sends an id."""

    def planned(memory: int) -> Plan:
        return make_plan(
            profile(KEYSPACE, 20_000.0, hot=3000), KEYSPACE, LAYOUT, cluster(),
            KEYSPACE.room_for_copies([4000]), Placement.empty(), ORIGIN, horizon_steps=1e9,
            shape=TrainingShape(frozen_tables=frozenset({"content"})), copies_memory_bytes=memory,
        )  # fmt: skip

    made, content = planned(10**6), KEYSPACE.keys(1, np.arange(4000))
    assert (made.target.tiers_of(content) == Tier.DEVICE).all()
    assert made.memory.used_bytes == copies_bytes(made.target, KEYSPACE, LAYOUT) <= 10**6
    # It costs nothing per step: neither ids nor rows of it are on the way, and no copy of it is synchronised.
    assert made.costs.after.exposed_seconds < made.costs.home.exposed_seconds / 1.5
    assert len(made.gains) == len(made.target)
    less = planned(150_000)
    assert less.memory.used_bytes <= 150_000
    assert not (less.target.tiers_of(content) == Tier.DEVICE).all()
    assert len(make_plan(
        profile(KEYSPACE, 20_000.0, hot=3000), KEYSPACE, LAYOUT, cluster(),
        KEYSPACE.room_for_copies([4000]), made.target, ORIGIN, horizon_steps=1e9,
        shape=TrainingShape(frozen_tables=frozenset({"content"})), copies_memory_bytes=10**6,
    ).delta) == 0  # fmt: skip
