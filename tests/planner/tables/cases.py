"""Small problems over tables, and their optimum by a full MILP."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from flexd.core.placement import RankLayout
from flexd.planner.model.workload import (
    ACCESSES,
    ANYWHERE,
    BACK_PER_NODE,
    BACK_PER_RANK,
    PER_NODE,
    PER_RANK,
    ROWS,
    STATISTICS,
)
from flexd.planner.tables.costs import CHAIN_OPTIONS, chain_options
from flexd.planner.tables.local_search import RankLoads
from flexd.planner.tables.options import TableOption, TableOptions, TableWork
from tests.support.planner_cases import cluster


def work_of(seed: int, count: int, layout: RankLayout, *, pooled: float = 0.8, largest: float = 2e5) -> TableWork:
    """Tables of log-normal look-ups, of which a share is pooled."""
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.uniform(np.log(50), np.log(largest), count))
    dim = rng.choice([4, 16, 64], count).astype(float)
    length = np.exp(rng.normal(1.5, 1.2, count)).clip(0.5, 100)
    bags = np.full(count, 256.0)
    accesses = bags * length

    def distinct(looked_up: np.ndarray) -> np.ndarray:
        return rows * -np.expm1(-looked_up / rows)

    statistics = np.zeros((count, STATISTICS))
    statistics[:, ROWS], statistics[:, ACCESSES] = rows, accesses
    for statistic, ranks in ((PER_RANK, 1), (PER_NODE, layout.local_ranks), (ANYWHERE, layout.world_size)):
        statistics[:, statistic] = distinct(accesses * ranks)
    statistics[:, BACK_PER_RANK], statistics[:, BACK_PER_NODE] = statistics[:, PER_RANK], statistics[:, PER_NODE]
    return TableWork(
        tuple(f"t{i}" for i in range(count)),
        statistics,
        np.where(rng.random(count) < pooled, bags, 0.0),
        2 * dim,
        4 * dim,
        np.full(count, 4.0),
        rows,
        np.ones(count),
        4,
    )


def options_of(
    seed: int, count: int, layout: RankLayout, options: tuple[TableOption, ...] = CHAIN_OPTIONS, **more: float
) -> TableOptions:
    return chain_options(work_of(seed, count, layout, **more), layout, cluster(latency=1e-6), options=options)


def best_by_milp(tables: TableOptions, layout: RankLayout, memory: float) -> float:
    """Seconds of the best placement of tables with one piece, without fixed seconds of pooling places."""
    choices = [
        (table, option, place)
        for table in range(len(tables.names))
        for option in np.flatnonzero(tables.allowed[table]).tolist()
        for place in range(tables.options[option].places(layout))
    ]
    phases, axes, world = len(tables.phases), len(tables.axis_phase), layout.world_size
    number = len(choices)
    loads = np.zeros((axes + 1, world, number))
    for at, choice in enumerate(choices):
        one = RankLoads(tables, layout, np.full(world, memory))
        one.add(*choice)
        loads[:, :, at] = one.total.reshape(axes + 1, world)
    seconds = tables.axis_seconds
    unit = float((loads[:-1].max(axis=1) * seconds[:, None]).sum())
    busy = np.zeros((axes * world, number + phases))
    for axis in range(axes):
        rows = slice(axis * world, (axis + 1) * world)
        busy[rows, :number] = loads[axis] * seconds[axis] / unit
        busy[rows, number + tables.axis_phase[axis]] = -1.0
    once = np.zeros((len(tables.names), number + phases))
    for at, (table, _, _) in enumerate(choices):
        once[table, at] = 1.0
    stored = np.concatenate([loads[-1] / memory, np.zeros((world, phases))], axis=1)
    result = milp(
        np.concatenate([np.zeros(number), np.ones(phases)]),
        constraints=[
            LinearConstraint(once, 1.0, 1.0),
            LinearConstraint(busy, ub=0.0),
            LinearConstraint(stored, ub=1.0),
        ],
        integrality=np.concatenate([np.ones(number), np.zeros(phases)]),
        bounds=Bounds(0.0, np.concatenate([np.ones(number), np.full(phases, np.inf)])),
        options={"mip_rel_gap": 1e-6, "time_limit": 20.0},
    )
    assert result.status == 0, result.message
    return float(result.fun) * unit
