"""The linear relaxation over tables by column generation, and a lower bound for every placement.

A phase takes at least the mean of the ranks' loads, and at least what one table alone gives to its busiest rank while
the others give theirs least. With shares of each table's options instead of a choice that is a linear program, whose
value no placement can beat. It has a row for every load axis and, as far as they bind, one for each table and axis, so
it is solved by Dantzig and Wolfe's decomposition (Operations Research 8, 1960): a column is one choice for all tables
that have no row of their own, priced out by the duals of a small master program (HiGHS). Any duals give a bound
(Lagrange); it is computed here from them, not taken from the solver.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flexd.core.arrays import BoolArray, Float64Array, Int64Array
from flexd.core.placement import RankLayout
from flexd.planner.tables.options import TableOptions

_ROUNDS = 80
_CUTS_A_ROUND = 40
_MOST_CUTS = 1200
_TIE = 1e-6
"""Weight of the busiest rank's load in the choice of columns: the bound does without."""
_SETTLED = 1e-5
"""Of the bound: the master's value is no further from it."""


@dataclass(frozen=True)
class Relaxation:
    """The result of ``relax``.

    Attributes:
        shares: float64[T, O], share of each option, mostly 0 and 1; all 0 if even shares do not fit into the memory.
        reduced_seconds: float64[T, O], price of each option at the duals; inf where another needs no more of anything.
        target: float64[K], loads of the relaxation: what the busiest rank should have at most.
        bound_seconds: no placement takes less; of no use if there is none within the memory.
    """

    shares: Float64Array
    reduced_seconds: Float64Array
    target: Float64Array
    bound_seconds: float


def relax(tables: TableOptions, layout: RankLayout, capacity: Float64Array) -> Relaxation:
    """Solve the relaxation.

    Args:
        capacity: float64[W], memory of each rank.
    """
    return _Master(tables, layout, capacity).solve()


@dataclass
class _Master:
    tables: TableOptions
    layout: RankLayout
    capacity: Float64Array
    columns: list[Int64Array] = field(default_factory=list)
    cut_table: list[int] = field(default_factory=list)
    cut_axis: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        tables, seconds = self.tables, self.tables.axis_seconds
        mean = tables.mean(tables.loads, self.layout) * seconds
        # All rows of the program in one unit, of the size of its value.
        self.unit = max(float(mean.sum(axis=2)[:, 0].sum()), 1e-300)
        seconds, self.mean = seconds / self.unit, mean / self.unit
        least, most = tables.extremes(tables.loads, self.layout)
        self.least, self.most = least * seconds, most * seconds
        self.room = float(self.capacity.mean())
        memory = tables.mean(tables.memory_bytes, self.layout)
        self.memory = memory / max(self.room, 1e-300)
        largest = tables.extremes(tables.memory_bytes, self.layout)[1]
        self.allowed = tables.allowed & (largest <= float(self.capacity.max()))
        self.allowed[:, 0] = True
        # Of options that cost the same in the mean the one that loads its busiest rank least is wanted.
        self.uneven = _TIE * self.most.sum(axis=2)
        self.barred = np.where(self.allowed, 0.0, np.inf)
        self.wanted = self.allowed & ~self._dominated()

    def _dominated(self) -> BoolArray:
        """bool[T, O]: options that need no less of anything, in the mean and at the busiest rank, than another.

        Of two that are equal the first is wanted. Only choices leave them out: another option may have more at every
        rank's least, so that the bound counts them.
        """
        result = np.zeros(self.allowed.shape, bool)
        options = range(self.allowed.shape[1])
        for option in options:
            for other in options:
                if other == option:
                    continue
                slack = 1 + 1e-9
                better = (self.mean[:, other] <= self.mean[:, option] * slack).all(axis=1)
                better &= (self.most[:, other] <= self.most[:, option] * slack).all(axis=1)
                better &= self.memory[:, other] <= self.memory[:, option] * slack
                result[:, option] |= better & self.allowed[:, other] & ~result[:, other]
        return result

    def solve(self) -> Relaxation:
        phases = len(self.tables.phases)
        uniform = 1.0 / np.bincount(self.tables.axis_phase, minlength=phases)[self.tables.axis_phase]
        best = self._bound(uniform, 0.0, np.empty(0))
        self.columns.append(best.choice)
        if self.memory.any():
            # The least memory, so that the master has a solution.
            self.columns.append(np.where(self.wanted, self.memory, np.inf).argmin(axis=1))
        shares = np.zeros(self.mean.shape[:2])
        value = np.inf
        for rounds in range(1, _ROUNDS + 1):
            solved = self._solve_master()
            if solved is None:
                break
            value, shares, weights, price, own = solved
            found = self._bound(weights, price, own)
            if found.value > best.value:
                best = found
            known = any(np.array_equal(found.choice, column) for column in self.columns)
            grown = self._add_cuts(shares) if rounds % 2 == 0 or known else False
            if not grown and (known or value - best.value <= _SETTLED * abs(value)):
                break
            if not known:
                self.columns.append(found.choice)
        target = np.einsum("to,tok->k", shares, self.mean)
        if len(self.cut_axis):
            peak = np.einsum("to,tok->tk", shares, self.most - self.least).max(axis=0)
            target = np.maximum(target, np.einsum("to,tok->k", shares, self.least) + peak)
        by_phase = np.maximum.reduceat(target, self.tables.phase_starts)
        seconds = np.asarray(by_phase)[self.tables.axis_phase] * self.unit
        target = seconds / np.where(self.tables.axis_seconds > 0, self.tables.axis_seconds, np.inf)
        prices = np.where(self.wanted, best.prices * self.unit, np.inf)
        return Relaxation(shares, prices, target, best.value * self.unit)

    def _bound(self, weights: Float64Array, price: float, own: Float64Array) -> _Bound:
        """The Lagrangian bound.

        Args:
            weights: float64[K] of the mean rows; with ``own`` they add up to 1 in each phase, or are scaled to it.
            price: of a share of the memory.
            own: float64[cuts].
        """
        phase = self.tables.axis_phase
        weights, own = np.maximum(weights, 0.0), np.maximum(own, 0.0)
        of_cuts = np.bincount(self.cut_axis[: len(own)], weights=own, minlength=len(phase)) if len(own) else 0.0
        total = np.bincount(phase, weights=weights + of_cuts, minlength=len(self.tables.phases))
        scale = np.where(total > 0, 1.0 / np.where(total > 0, total, 1.0), 0.0)
        if (total <= 0).any():
            weights = weights.copy()
            weights[self.tables.phase_starts[total <= 0]] = 1.0
            scale = np.where(total > 0, scale, 1.0)
        weights = weights * scale[phase]
        prices = self.barred + self.mean @ weights + max(price, 0.0) * self.memory
        if len(own):
            own = own * scale[phase[self.cut_axis]]
            prices += self.least @ np.bincount(self.cut_axis, weights=own, minlength=len(phase))
            rise = (self.most - self.least)[self.cut_table, :, self.cut_axis]
            np.add.at(prices, np.array(self.cut_table), own[:, None] * rise)
        choice = np.where(self.wanted, prices + self.uneven, np.inf).argmin(axis=1)
        value = float(prices.min(axis=1).sum()) - max(price, 0.0)
        return _Bound(value, prices, choice.astype(np.int64))

    def _solve_master(self) -> tuple[float, Float64Array, Float64Array, float, Float64Array] | None:
        """(value, shares, weights of the mean rows, price of memory, of the cuts); None if there is no solution."""
        # Imported on first use: scipy is the daemon's, and a trainer never plans.
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        tables, axes, phases = len(self.tables.names), len(self.tables.axis_phase), len(self.tables.phases)
        own = np.array(sorted(set(self.cut_table)), dtype=np.int64)
        single = np.zeros(tables, bool)
        single[own] = True
        # Variables: phases z, least loads e, shares of the own tables' options, weights of the columns.
        own_table, own_option = np.nonzero(self.wanted & single[:, None])
        rest = np.flatnonzero(~single)
        columns = np.stack(self.columns)
        columns = columns[list({column[rest].tobytes(): at for at, column in enumerate(columns)}.values())]
        mean_of = np.stack([self.mean[rest, c[rest]].sum(axis=0) for c in columns])
        least_of = np.stack([self.least[rest, c[rest]].sum(axis=0) for c in columns])
        cost_of = self.barred + self.uneven
        extra_of = np.array([cost_of[rest, c[rest]].sum() for c in columns])
        memory_of = np.array([self.memory[rest, c[rest]].sum() for c in columns])
        z, e, y = 0, phases, phases + axes
        w = y + len(own_table)
        n = w + len(columns)
        axis = np.arange(axes)
        rows: list[Float64Array] = []
        mean = np.zeros((axes, n))
        mean[axis, z + self.tables.axis_phase] = -1.0
        mean[:, y:w] = self.mean[own_table, own_option].T
        mean[:, w:] = mean_of.T
        rows.append(mean)
        least = np.zeros((axes, n))
        least[axis, e + axis] = -1.0
        least[:, y:w] = self.least[own_table, own_option].T
        least[:, w:] = least_of.T
        rows.append(least)
        memory = np.zeros((1, n))
        memory[0, y:w], memory[0, w:] = self.memory[own_table, own_option], memory_of
        rows.append(memory)
        if self.cut_table:
            cut_table, cut_axis = np.array(self.cut_table), np.array(self.cut_axis)
            cuts = np.zeros((len(cut_table), n))
            at = np.arange(len(cut_table))
            cuts[at, z + self.tables.axis_phase[cut_axis]] = -1.0
            cuts[at, e + cut_axis] = 1.0
            mine = own_table[None, :] == cut_table[:, None]
            rise = self.most[own_table, own_option] - self.least[own_table, own_option]
            cuts[:, y:w] = np.where(mine, rise.T[cut_axis], 0.0)
            rows.append(cuts)
        matrix = np.concatenate(rows)
        upper = np.zeros(len(matrix))
        upper[2 * axes] = 1.0
        once = np.zeros((len(own) + 1, n))
        once[np.searchsorted(own, own_table), y + np.arange(len(own_table))] = 1.0
        once[len(own), w:] = 1.0
        cost = np.concatenate([np.ones(phases), np.zeros(axes), cost_of[own_table, own_option], extra_of])
        result = linprog(
            cost, A_ub=csr_matrix(matrix), b_ub=upper, A_eq=csr_matrix(once), b_eq=np.ones(len(once)),
            bounds=(0, None), method="highs",
        )  # fmt: skip
        if result.x is None or result.status != 0:
            return None
        shares = np.zeros(self.mean.shape[:2])
        shares[own_table, own_option] = result.x[y:w]
        for column, weight in zip(columns, result.x[w:], strict=True):
            shares[rest, column[rest]] += weight
        duals = -np.asarray(result.ineqlin.marginals, dtype=np.float64)
        value = float(result.fun) - float((shares * self.uneven).sum())
        return value, shares, duals[:axes], float(duals[2 * axes]), duals[2 * axes + 1 :]

    def _add_cuts(self, shares: Float64Array) -> bool:
        """Add the rows that these shares break most; return whether there are any."""
        if len(self.cut_table) >= _MOST_CUTS:
            return False
        base = np.einsum("to,tok->k", shares, self.least)
        mean = np.einsum("to,tok->k", shares, self.mean)
        have = mean
        if self.cut_table:
            peak = np.einsum("to,tok->tk", shares, self.most - self.least)[self.cut_table, self.cut_axis]
            have = mean.copy()
            np.maximum.at(have, np.array(self.cut_axis), base[self.cut_axis] + peak)
        z = np.asarray(np.maximum.reduceat(have, self.tables.phase_starts))[self.tables.axis_phase]
        over = base + np.einsum("to,tok->tk", shares, self.most - self.least) - z
        over[self.cut_table, self.cut_axis] = 0.0
        worst = np.argsort(-over, axis=None, kind="stable")[:_CUTS_A_ROUND]
        limit = 1e-7 * float(z.sum())
        found = [divmod(int(at), over.shape[1]) for at in worst if over.ravel()[at] > limit]
        self.cut_table += [table for table, _ in found]
        self.cut_axis += [axis for _, axis in found]
        return bool(found)


@dataclass(frozen=True)
class _Bound:
    value: float
    prices: Float64Array
    choice: Int64Array
