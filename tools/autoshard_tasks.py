"""Sharding tasks of listed tables for ``bench_autoshard``: what a rank that holds whole tables looks up and pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from autoshard_policy import ShardingTask
from planner_problems import problem_of

from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.tables.chain_costs import DeviceMemory
from flexd.planner.tables.kernel_costs import PHASES, AnalyticModel, KernelCosts, PhaseCosts
from flexd.planner.tables.kernel_plans import held_pieces
from flexd.planner.tables.kernel_work import DIMS_TERM, TERMS
from flexd.planner.tables.kernel_work import Pieces as KernelPieces
from flexd.planner.tables.options import Answer, HomeKind, Option
from flexd.planner.tables.table_list import ListedTable
from flexd.planner.tables.table_work import TableWork
from flexd.sketch.profile import Profile
from flexd.topology.kernel_file import KernelMeasurements

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

SKEW = 1.05
LISTED_ROWS = 1000
LEAST_SHARE = 1e-4
"""Of the mean table's cost: cheaper tables, and those without look-ups, look alike to the policy."""
WHOLE = Option(HomeKind.RANK, Answer.SUMS)
"""A table whole on one rank, which answers by sums: what placements alone are compared with."""


def analytic_costs(device: DeviceMemory | None = None) -> KernelCosts:
    """Return bytes over the bandwidth that plans without measurements assume."""
    seconds_per_byte = 1.0 / (device or DeviceMemory()).bytes_per_second
    models = [AnalyticModel(phase, seconds_per_byte) for phase in range(len(PHASES))]
    least, most = np.zeros(len(TERMS)), np.full(len(TERMS), np.inf)
    none = KernelMeasurements("flexd", "none", "analytic", (), np.empty(0), np.empty(0), np.empty(0))
    return KernelCosts(none, tuple(PhaseCosts(model, "analytic", model, {}, least, most) for model in models))


@dataclass(frozen=True)
class TablePool:
    """Pooled tables that tasks are drawn from, on one layout.

    Attributes:
        costs: seconds of the kernels.
        memory_bytes: of a rank.
    """

    tables: tuple[ListedTable, ...]
    layout: RankLayout
    costs: KernelCosts
    memory_bytes: float

    @cached_property
    def problem(self) -> tuple[Profile, KeySpace, TrainingShape]:
        """Every table Zipf with ``SKEW``."""
        return problem_of(self.tables, self.layout.world_size, SKEW, [LISTED_ROWS] * len(self.tables))

    @cached_property
    def work(self) -> TableWork:
        """Work of the tables in one step."""
        profile, keyspace, shape = self.problem
        return TableWork.of(profile, keyspace, self.layout, shape)

    @cached_property
    def dims(self) -> list[int]:
        """Dims of the tables."""
        return [table.dim for table in self.tables]

    @cached_property
    def held(self) -> KernelPieces:
        """What a rank that holds a table looks up in one step of all ranks, by table."""
        return held_pieces(self.work, self.dims, self.layout, [WHOLE])

    @cached_property
    def cost(self) -> Float64Array:
        """float64[T] seconds of each table on its own."""
        return np.asarray(self.costs.seconds(self.held.terms()).sum(axis=1))

    def task(self, chosen: Int64Array) -> ShardingTask:
        """Return the task of these tables."""
        terms, dims = self.held.terms()[chosen], self.held.dim[chosen]
        groups = (dims[:, None] == np.unique(dims)).astype(np.float64)
        devices = self.layout.world_size

        def device_seconds(device: Int64Array) -> Float64Array:
            on = (device[:, :, None] == np.arange(devices)).astype(np.float64)
            work = np.einsum("etd,tk->edk", on, terms)
            work[..., DIMS_TERM] = (np.einsum("etd,tg->edg", on, groups) > 0).sum(axis=2)
            seconds = self.costs.seconds(work.reshape(-1, len(TERMS))).sum(axis=1)
            return np.asarray(seconds.reshape(len(device), devices))

        cost, size = self.cost[chosen], self.work.stored_bytes[chosen]
        share = cost * len(cost) / max(float(cost.sum()), 1e-300)
        logs = [np.log1p(column[chosen]) / 10 for column in (self.held.rows, self.held.dim, self.held.ids)]
        features = np.stack([share, np.log(np.maximum(share, LEAST_SHARE)), *logs, size / self.memory_bytes], axis=1)
        return ShardingTask(features, cost, size, devices, self.memory_bytes, device_seconds)

    def drawn(self, rng: np.random.Generator, fewest: int, most: int) -> ShardingTask:
        """Return a random task of ``fewest`` to ``most`` tables."""
        count = min(int(rng.integers(fewest, most + 1)), len(self.tables))
        return self.task(rng.choice(len(self.tables), count, replace=False))


def split_tables(
    tables: Sequence[ListedTable], memory_bytes: float, rng: np.random.Generator
) -> tuple[list[ListedTable], list[ListedTable]]:
    """Return (tables to train on, tables held out): halves of the pooled ones that fit a rank."""
    pooled = [table for table in tables if table.bags > 0 and table.rows * (2.0 * table.dim + 4) <= memory_bytes]
    order = rng.permutation(len(pooled)).tolist()
    half = len(pooled) // 2
    return [pooled[at] for at in sorted(order[:half])], [pooled[at] for at in sorted(order[half:])]
