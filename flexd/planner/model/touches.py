"""Touches of rows: frequencies with which a rank, a node or any rank needs a row in a forward pass.

All touches are float64[3, n]: by a given rank (u), by any rank of a given node (v), by any rank (w). They are measured
where the profile has them. Elsewhere a relation that is fitted to the measured rows of the table applies, and without
any measured row independence (docs/cost-model.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Float64Array
from flexd.core.placement import RankLayout
from flexd.sketch.profile import TableProfile

BATCH_SIZE_FACTOR = 1.25
"""Touches of batches that are larger or smaller than those of the ranks by more than this are not used."""
_KNOTS = 16
"""Classes of equal independent touches to which a relation is fitted."""


def independent(accesses: Float64Array, layout: RankLayout) -> Float64Array:
    """Return the touches of rows that every rank looks up Poisson(accesses) times, independent of the other ranks."""
    ranks = np.array([1, layout.local_ranks, layout.world_size], dtype=np.float64)
    result: Float64Array = -np.expm1(-np.outer(ranks, accesses))
    return result


def bounded(touches: Float64Array, accesses: Float64Array, layout: RankLayout) -> Float64Array:
    """Return the touches within what any batches can have: u <= a, u <= v <= w <= 1, v <= L u, w <= N v."""
    rank = np.clip(touches[0], 0.0, np.minimum(accesses, 1.0))
    node = np.clip(touches[1], rank, np.minimum(layout.local_ranks * rank, 1.0))
    anywhere = np.clip(touches[2], node, np.minimum(layout.nodes * node, 1.0))
    return np.stack([rank, node, anywhere])


def rescaled(touches: Float64Array, before: Float64Array, after: Float64Array, layout: RankLayout) -> Float64Array:
    """Return the touches of the same rows at other accesses: the ratio to independent touches is kept."""
    ratio = _ratio(touches, independent(before, layout))
    return bounded(ratio * independent(after, layout), after, layout)


@dataclass(frozen=True)
class TouchRelation:
    """Touches as a function of the accesses, fitted to rows with measured touches.

    Attributes:
        log_accesses: by statistic (u, v, w) float64[knots], ascending.
        ratio: by statistic float64[knots], measured over independent touches; between the knots it is linear in the
            logarithm of the accesses, beyond them constant. The touches at the knots grow with the accesses.
    """

    layout: RankLayout
    log_accesses: tuple[Float64Array, Float64Array, Float64Array]
    ratio: tuple[Float64Array, Float64Array, Float64Array]

    @staticmethod
    def fit(accesses: Float64Array, measured: Float64Array, layout: RankLayout) -> TouchRelation:
        """Fit to measured touches, NaN where unknown. A statistic of which nothing is measured has the ratio 1."""
        expected = independent(accesses, layout)
        knots = [_fit_one(accesses, expected[i], measured[i]) for i in range(3)]
        return TouchRelation(layout, (knots[0][0], knots[1][0], knots[2][0]), (knots[0][1], knots[1][1], knots[2][1]))

    def ratios(self, accesses: Float64Array) -> Float64Array:
        """Return float64[3, n], measured over independent touches as fitted."""
        at = np.log(np.maximum(accesses, np.finfo(np.float64).tiny))
        return np.stack([np.interp(at, self.log_accesses[i], self.ratio[i]) for i in range(3)])

    def touches(self, accesses: Float64Array) -> Float64Array:
        """Return the touches that rows of these accesses are expected to have."""
        return bounded(self.ratios(accesses) * independent(accesses, self.layout), accesses, self.layout)

    def completed(self, accesses: Float64Array, measured: Float64Array) -> Float64Array:
        """Return the measured touches, with fitted ones in place of NaN."""
        touches = np.where(np.isnan(measured), self.ratios(accesses) * independent(accesses, self.layout), measured)
        return bounded(touches, accesses, self.layout)


def measured_touches(
    table: TableProfile, layout: RankLayout, accesses_of_rank: float | None = None
) -> Float64Array | None:
    """Return the measured touches of the table's listed rows, NaN where unknown; None if none apply to this layout.

    Touches depend on the number of ranks of a node and of nodes, so those of another layout are not used. Nor are those
    of batches of another size: entries of a stream without step numbers need not be what a rank looks up at once.

    Args:
        accesses_of_rank: look-ups of the table by a rank in one pass, to which the touches are brought if they were
            measured at other ones; None takes them as they are.
    """
    touches = table.touches
    if touches is None or (touches.nodes, touches.local_ranks) != (layout.nodes, layout.local_ranks):
        return None
    measured = np.stack([touches.per_rank, touches.per_node, touches.anywhere]).astype(np.float64)
    if np.isnan(measured).all():
        return None
    if accesses_of_rank is None or touches.accesses is None:
        return measured
    if not touches.accesses / BATCH_SIZE_FACTOR <= accesses_of_rank <= touches.accesses * BATCH_SIZE_FACTOR:
        return None
    share = table.hot_share.astype(np.float64)
    return rescaled(measured, share * touches.accesses, share * accesses_of_rank, layout)


def _ratio(touches: Float64Array, expected: Float64Array) -> Float64Array:
    return np.divide(touches, expected, out=np.ones_like(touches), where=expected > 0)


def _fit_one(
    accesses: Float64Array, expected: Float64Array, measured: Float64Array
) -> tuple[Float64Array, Float64Array]:
    known = np.flatnonzero(~np.isnan(measured) & (expected > 0))
    if not len(known):
        return np.zeros(1), np.ones(1)
    order = known[np.argsort(accesses[known], kind="stable")]
    weight = expected[order]
    # Rows of equal accesses share a class, so that the fit does not depend on their order.
    level = np.unique(accesses[order], return_inverse=True)[1]
    level_end = np.cumsum(np.bincount(level, weights=weight))
    knot = np.minimum((_KNOTS * level_end / level_end[-1] - 1e-9).astype(np.int64), _KNOTS - 1)[level]
    knot = np.unique(knot, return_inverse=True)[1]
    total = np.bincount(knot, weights=weight)
    rows = np.bincount(knot)
    log_accesses = np.bincount(knot, weights=weight * np.log(accesses[order])) / total
    mean_expected = total / rows
    mean_measured = _ascending(np.bincount(knot, weights=measured[order]) / rows, rows.astype(np.float64))
    return log_accesses, mean_measured / mean_expected


def _ascending(values: Float64Array, weights: Float64Array) -> Float64Array:
    """Return the closest values that do not descend (pool adjacent violators, weighted least squares)."""
    means: list[float] = []
    sums: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while means and means[-1] > mean:
            last, before = sums.pop(), means.pop()
            mean = (mean * total + before * last) / (total + last)
            total, count = total + last, count + counts.pop()
        means.append(mean)
        sums.append(total)
        counts.append(count)
    return np.repeat(np.array(means), counts)
