"""Placements of TorchRec's shardings whose look-ups and updates are priced by learned costs of sets of tables.

The planner adds loads up, and a set costs less than the sum of its tables. So a piece is planned with what it adds to a
set, scaled so that the ranks of a first plan, by bytes, have the seconds of their sets; of both plans the one is kept
whose step is shorter by the costs of sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout
from flexd.planner.model.workload import ACCESSES, ANYWHERE, PER_RANK
from flexd.planner.tables.chain_costs import parts_of_bags
from flexd.planner.tables.kernel_costs import PHASES, KernelCosts
from flexd.planner.tables.kernel_costs import Pieces as KernelPieces
from flexd.planner.tables.options import HomeKind, Option, Part, TableOptions
from flexd.planner.tables.rank_loads import Pieces, RankLoads
from flexd.planner.tables.solve import TablePlacement, place_tables
from flexd.planner.tables.table_work import TableWork

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_HOLDERS = {
    HomeKind.ALL: Part.EVERYWHERE,
    HomeKind.COPIES: Part.EVERYWHERE,
    HomeKind.NODE: Part.HOME_NODE,
    HomeKind.RANK: Part.HOME_RANK,
    HomeKind.COLUMNS: Part.HOME_RANK,
}
_KERNELS = len(PHASES)


@dataclass(frozen=True)
class KernelPrices:
    """Prices of placements with kernels by learned costs.

    Attributes:
        tables: options whose last axes are look-up and update.
        costs: learned.
        held: float64 columns [T * O], what a rank that holds a piece looks up.
    """

    tables: TableOptions
    layout: RankLayout
    costs: KernelCosts
    held: KernelPieces

    @classmethod
    def of(
        cls, tables: TableOptions, work: TableWork, dims: Sequence[int], layout: RankLayout, costs: KernelCosts
    ) -> KernelPrices:
        """Make the prices of these options of TorchRec."""
        return cls(tables, layout, costs, held_pieces(work, dims, layout, tables.options))

    def rank_work(self, pieces: Pieces) -> Float64Array:
        """Return float64[W, TERMS], the work of every rank with the tables that it holds under a placement."""
        layout, ranks = self.layout, np.arange(self.layout.world_size)
        rule = np.array([option.rule.value for option in self.tables.options])[pieces.option]
        everywhere = (rule == HomeKind.ALL) | (rule == HomeKind.COPIES)
        node = rule == HomeKind.NODE
        one = ~everywhere & ~node
        number = np.arange(len(rule))
        first = pieces.place[node][:, None] * layout.local_ranks
        of_piece = [
            number[one],
            np.repeat(number[everywhere], layout.world_size),
            np.repeat(number[node], layout.local_ranks),
        ]
        of_rank = [
            pieces.place[one],
            np.tile(ranks, int(everywhere.sum())),
            (first + np.arange(layout.local_ranks)).ravel(),
        ]
        chosen = np.concatenate(of_piece)
        at = pieces.table[chosen] * len(self.tables.options) + pieces.option[chosen]
        return self.held.chosen(at).work(np.concatenate(of_rank), layout.world_size)

    def kernel_seconds(self, pieces: Pieces) -> Float64Array:
        """Return float64[W, 2], by ``kernel_costs.PHASES``."""
        return self.costs.seconds(self.rank_work(pieces))

    def seconds(self, pieces: Pieces) -> float:
        """Return the seconds of a step: the exchange of the busiest ranks phase by phase, and their kernels."""
        loads = RankLoads.of(self.tables, self.layout, np.full(self.layout.world_size, np.inf), pieces)
        exchange = self.tables.seconds_per_unit[:-_KERNELS] @ loads.maxima()[:-_KERNELS]
        return float(exchange + self.kernel_seconds(pieces).max(axis=0).sum())

    def priced(self, pieces: Pieces) -> TableOptions:
        """Return the options with kernels in seconds: what a piece adds to the set of the rank that holds it, scaled so
        that the busiest ranks of this placement have the seconds of their sets."""
        terms = self.held.terms()
        added = np.stack([phase.added(terms) for phase in self.costs.phases], axis=1)
        by_option = added.reshape(-1, len(self.tables.options), _KERNELS)
        held = np.zeros((*self.tables.loads.shape[:3], _KERNELS))
        for at, option in enumerate(self.tables.options):
            held[:, at, _HOLDERS[option.rule]] = by_option[:, at]
        loads, seconds = self.tables.loads.copy(), self.tables.seconds_per_unit.copy()
        loads[..., -_KERNELS:], seconds[-_KERNELS:] = held, 1.0
        plain = replace(self.tables, loads=loads, seconds_per_unit=seconds)
        summed = RankLoads.of(plain, self.layout, np.full(self.layout.world_size, np.inf), pieces).maxima()[-_KERNELS:]
        sets = self.kernel_seconds(pieces).max(axis=0)
        loads = loads.copy()
        loads[..., -_KERNELS:] = held * (sets / np.where(summed > 0, summed, 1.0))
        return replace(plain, loads=loads)


def place_by_kernels(prices: KernelPrices, memory_bytes: float, evaluations: int) -> TablePlacement:
    """Plan by bytes, then by what pieces add to the sets of that plan; return the plan of the shorter step, with its
    seconds by the costs of sets. No bound is known: these are no sum over tables.

    Raises:
        PlanError: as ``place_tables``.
    """
    by_bytes = place_tables(prices.tables, prices.layout, memory_bytes, evaluations=evaluations)
    by_costs = place_tables(prices.priced(by_bytes.pieces), prices.layout, memory_bytes, evaluations=evaluations)
    best = min((by_costs, by_bytes), key=lambda placement: prices.seconds(placement.pieces))
    count = len(prices.tables.names)
    spread = Pieces(np.arange(count), np.zeros(count, np.int64), np.zeros(count, np.int64))
    return replace(best, seconds=prices.seconds(best.pieces), spread_seconds=prices.seconds(spread), bound_seconds=0.0)


def held_pieces(work: TableWork, dims: Sequence[int], layout: RankLayout, options: Sequence[Option]) -> KernelPieces:
    """Return what a rank that holds a piece looks up in one step of all ranks: columns [T * O], options innermost."""
    dim = np.array(dims, dtype=np.float64)
    statistics, world = work.statistics.T, layout.world_size
    ids = statistics[ACCESSES] * world
    bags = np.where(work.bags > 0, work.bags, statistics[ACCESSES]) * world
    length = ids / np.maximum(bags, 1e-9)
    columns = []
    for option in options:
        if option.rule is HomeKind.COPIES:
            mine = (work.rows, dim, ids / world, bags / world, statistics[PER_RANK], work.row_bytes)
        else:
            ranks = {HomeKind.ALL: world, HomeKind.NODE: layout.local_ranks}.get(option.rule, 1)
            mine = (
                work.rows / ranks, dim / option.pieces, ids / ranks, bags * parts_of_bags(length, ranks) / ranks,
                statistics[ANYWHERE] / ranks, work.row_bytes / option.pieces,
            )  # fmt: skip
        columns.append(np.stack(mine))
    flat = np.stack(columns, axis=2).reshape(6, -1)
    return KernelPieces(*flat)
