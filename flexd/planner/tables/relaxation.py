"""The linear relaxation over tables, and a lower bound for every placement.

A phase takes at least the mean of the ranks' loads, and at least what one table alone gives to its busiest rank while
the others give theirs least. With shares of each table's options instead of a choice that is a linear program (HiGHS),
whose value no placement can beat. Rows of single tables are added as far as they bind.
"""

from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import BoolArray, Float64Array
from flexd.core.placement import RankLayout
from flexd.planner.tables.options import TableOptions

# Of single tables, that are added at once.
_ROWS_A_ROUND = 400
# Share of its value by which a round raises the program at least, but for the last.
_SETTLED = 1e-5
# Weight of the busiest rank's load: of options that cost the same in the mean the one that loads it least counts.
_TIE = 1e-6


@dataclass(frozen=True)
class Relaxation:
    """The result of ``relax``.

    Attributes:
        shares: float64[T, O], share of each option, mostly 0 and 1.
        reduced_seconds: float64[T, O], price of each option at the duals; inf where it is not allowed.
        target: float64[K], loads of the relaxation: what the busiest rank should have at most.
        bound_seconds: no placement takes less.
    """

    shares: Float64Array
    reduced_seconds: Float64Array
    target: Float64Array
    bound_seconds: float


def relax(tables: TableOptions, layout: RankLayout, capacity: Float64Array) -> Relaxation | None:
    """Solve the relaxation; None if no shares fit into the memory.

    Args:
        capacity: float64[W], memory of each rank.
    """
    # Imported on first use: scipy is the daemon's, and a trainer never plans.
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, eye_array, hstack, vstack

    means = tables.mean(tables.loads, layout) * tables.axis_seconds
    # All rows of the program in one unit, of the size of its value.
    unit = max(float(means[:, 0].sum()), 1e-300)
    least, most = (loads * tables.axis_seconds / unit for loads in tables.extremes(tables.loads, layout))
    allowed = tables.allowed & (tables.extremes(tables.memory_bytes, layout)[1] <= capacity.max())
    table, option = np.nonzero(allowed)
    mean, least, rise = means[table, option] / unit, least[table, option], (most - least)[table, option]
    axes, phases, shares = len(tables.axis_phase), len(tables.phases), len(table)
    of_phase = csr_array((np.ones(axes), (np.arange(axes), tables.axis_phase)), shape=(axes, phases))
    # Variables: shares, seconds of the phases, sums of the least loads by axis.
    memories = tables.mean(tables.memory_bytes, layout) / capacity.mean()
    upper = vstack(
        [
            hstack([csr_array(mean.T), -of_phase, csr_array((axes, axes))]),
            hstack([csr_array(least.T), csr_array((axes, phases)), -eye_array(axes)]),
            hstack([csr_array(memories[table, option][None, :]), csr_array((1, phases + axes))]),
        ]
    )
    limits = np.append(np.zeros(2 * axes), 1.0)
    once = csr_array((np.ones(shares), (table, np.arange(shares))), shape=(len(tables.names), shares + phases + axes))
    cost = np.concatenate([_TIE * most[table, option].sum(axis=1), np.ones(phases), np.zeros(axes)])
    value = 0.0
    while True:
        solved = linprog(cost, upper, limits, once, np.ones(len(tables.names)), method="highs")
        if solved.x is None:
            return None
        seconds, sums = solved.x[shares : shares + phases], solved.x[shares + phases :]
        over = np.zeros((len(tables.names), axes))
        np.add.at(over, table, rise * solved.x[:shares, None])
        over += sums - seconds[tables.axis_phase]
        worst = np.argsort(-over, axis=None, kind="stable")[:_ROWS_A_ROUND]
        of_table, of_axis = np.unravel_index(worst[over.ravel()[worst] > 1e-7 * seconds.sum()], over.shape)
        if not len(of_table) or solved.fun <= value * (1 + _SETTLED):
            break
        value = solved.fun
        own = csr_array((table[None, :] == of_table[:, None]) * rise.T[of_axis])
        upper = vstack([upper, hstack([own, -of_phase[of_axis], eye_array(axes, format="csr")[of_axis]])])
        limits = np.append(limits, np.zeros(len(of_table)))
    found, prices = np.zeros(allowed.shape), np.full(allowed.shape, np.inf)
    found[table, option] = solved.x[:shares]
    duals = -unit * solved.ineqlin.marginals
    prices[table, option] = (duals @ upper)[:shares]
    # The dual program's value, without the ties.
    bound = float(prices.min(axis=1).sum() - duals @ limits)
    needs = np.concatenate([means, most, memories[..., None]], axis=2)
    prices[_dominated(needs, allowed)] = np.inf
    # Of options that cost the same the program may choose one that another dominates.
    wanted = np.where(np.isfinite(prices), found, 0.0)
    wanted[np.arange(len(found)), prices.argmin(axis=1)] += (found - wanted).sum(axis=1)
    of_axis = np.where(tables.axis_seconds > 0, tables.axis_seconds, np.inf)
    return Relaxation(wanted, prices, seconds[tables.axis_phase] * unit / of_axis, bound)


def _dominated(needs: Float64Array, allowed: BoolArray) -> BoolArray:
    """bool[T, O]: options that need no less of anything, float64[T, O, n], than another; of two equal ones the second.

    The program has them: another option may have more at every rank's least.
    """
    # bool[T, option, other]
    better = (needs[:, None] <= needs[:, :, None] * (1 + 1e-9)).all(axis=3) & allowed[:, None]
    first = np.tri(needs.shape[1], k=-1, dtype=np.bool_)
    return np.asarray((better & (first | ~better.transpose(0, 2, 1))).any(axis=2), dtype=np.bool_)
