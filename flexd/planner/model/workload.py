"""Load of each dim-group from a profile: expected look-ups of each row by a rank in one step, and its statistics.

Touches are the frequencies with which a rank, a node or any rank needs a row in a forward pass, all float64[3, n]: by a
given rank (u), by any rank of a given node (v), by any rank (w). They are measured where the profile has them.
Elsewhere a relation that is fitted to the measured rows of the table applies, and without any measured row independence
(docs/cost-model.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array, UInt8Array
from flexd.core.errors import PlanError
from flexd.core.keyspace import DTYPE_BYTES, QUANTIZED, KeySpace, TableSpec
from flexd.core.placement import RankLayout, Tier
from flexd.sketch.profile import Profile, TableProfile

BATCH_SIZE_FACTOR = 1.25
"""Touches of batches that are larger or smaller than those of the ranks by more than this are not used."""
# Classes of equal independent touches to which a relation is fitted.
_KNOTS = 16


def independent(accesses: Float64Array, layout: RankLayout) -> Float64Array:
    """Return the touches of rows that every rank looks up Poisson(accesses) times, independent of the other ranks."""
    ranks = np.array([1, layout.local_ranks, layout.world_size], dtype=np.float64)
    return -np.expm1(-np.outer(ranks, accesses))


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
    from scipy.optimize import isotonic_regression

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
    # Touches grow with the accesses: the closest means that do not descend.
    mean_measured = isotonic_regression(np.bincount(knot, weights=measured[order]) / rows, weights=rows).x
    return log_accesses, mean_measured / mean_expected


@dataclass(frozen=True)
class TrainingShape:
    """Properties of training that change the bytes of a step. Defaults: one batch per optimizer step, every table
    trained, rows on the wire as they are stored.

    Attributes:
        micro_batches: forward passes for each optimizer step. Rows are looked up in every one; their gradients are
            merged before they travel, and replicas are synchronised once per step.
        comm_dtype: of rows and gradients on the wire; None: the table's own.
        frozen_tables: names of tables that are read only: no backward pass, no synchronisation.

    Raises:
        PlanError: a number below its least, or a dtype that does not exist.
    """

    micro_batches: int = 1
    comm_dtype: str | None = None
    frozen_tables: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise PlanError(f"micro_batches: {self.micro_batches}", remedy="give at least 1")
        if self.comm_dtype is not None and self.comm_dtype not in DTYPE_BYTES:
            raise PlanError(f"comm_dtype: {self.comm_dtype!r}", remedy=f"one of {', '.join(DTYPE_BYTES)}")

    def of_table(self, name: str) -> TrainingShape:
        """Return the shape of a job that has only this table."""
        return replace(self, frozen_tables=self.frozen_tables & {name})

    def wire_row_bytes(self, table: TableSpec) -> int:
        """Return the bytes of one row of the table on the wire."""
        if table.dtype == QUANTIZED:  # travels as it is stored
            return table.row_bytes
        return table.dim * DTYPE_BYTES[self.comm_dtype or table.dtype]

    def narrow_wire(self, table: TableSpec) -> bool:
        """Return whether the table's gradients travel in a narrower dtype than they are added in.

        They are added in float32, or the wider of table and wire.
        An all-reduce adds in the dtype that travels, so these are summed at their homes.
        """
        wire, stored = DTYPE_BYTES[self.comm_dtype or table.dtype], DTYPE_BYTES[table.dtype]
        return wire < max(DTYPE_BYTES["float32"], stored)


(
    ROWS,
    ACCESSES,
    PER_RANK,
    PER_NODE,
    ANYWHERE,
    SYNCED,
    BACK_PER_RANK,
    BACK_PER_NODE,
) = range(8)
"""Statistics of a row in one optimizer step (docs/cost-model.md has the formulas):

ROWS 1, so that sums count rows. ACCESSES look-ups of a rank. PER_RANK, PER_NODE: forward passes in which a given rank,
or any rank of a given node, looks the row up. ANYWHERE: probability that any rank does and the row is trained. SYNCED:
forward passes, in each of which its touched bit travels, if it is trained. The BACK ones are the probabilities that the
row's gradient travels in the backward pass.
"""
STATISTICS = 8


@dataclass(frozen=True)
class RowLoads:
    """Expected look-ups of n rows by a rank in one optimizer step.

    Attributes:
        accesses: float64[n].
        trained: float64[n], 0 for rows of frozen tables. None: 1 for all.
        touches: float64[3, n], presence probabilities in one forward pass (``touches``). None: independence.
    """

    accesses: Float64Array
    trained: Float64Array | None = None
    touches: Float64Array | None = None


@dataclass(frozen=True)
class GroupLoad:
    """The expected accesses to the rows of one dim-group, and their statistics.

    Attributes:
        group: index into ``KeySpace.groups``.
        spec: one of its tables: all have its dim, dtype and optimizer.
        keys: int64[h], rows listed one by one, ascending.
        listed: their loads.
        bounds: float64[2, h], lower and upper bounds of their accesses.
        bins: loads of one row of each frequency bin of the other rows.
        bin_rows: float64[k], rows of each bin.
    """

    group: int
    spec: TableSpec
    shape: TrainingShape
    layout: RankLayout
    keys: Int64Array
    listed: RowLoads
    bounds: Float64Array
    bins: RowLoads
    bin_rows: Float64Array

    @property
    def wire_bytes(self) -> int:
        """Bytes of one row in a message."""
        return self.shape.wire_row_bytes(self.spec)

    @property
    def sums_at_home(self) -> bool:
        """True if gradients of copies are summed at their homes instead of all-reduced."""
        return self.shape.narrow_wire(self.spec)

    @property
    def tail_accesses(self) -> float:
        """Mean accesses of an unlisted row, assumed for rows about which nothing else is known."""
        rows = float(self.bin_rows.sum())
        return float(self.bins.accesses @ self.bin_rows) / rows if rows > 0 else 0.0

    @cached_property
    def statistics(self) -> Float64Array:
        """float64[STATISTICS, h] of the listed rows."""
        return self.statistics_of(self.listed)

    def statistics_at(self, accesses: Float64Array) -> Float64Array:
        """Return float64[STATISTICS, h] of the listed rows with other accesses."""
        touches, passes = self.listed.touches, self.shape.micro_batches
        if touches is not None:
            touches = rescaled(touches, self.listed.accesses / passes, accesses / passes, self.layout)
        return self.statistics_of(RowLoads(accesses, self.listed.trained, touches))

    def statistics_of(self, rows: RowLoads) -> Float64Array:
        """Return float64[STATISTICS, n].

        In each of K micro-batches a / K of the look-ups happen. The passes of a step are taken as independent of each
        other. See docs/cost-model.md. Without measured touches a row that each of g ranks looks up Poisson(a / K) times
        is among their keys with probability 1 - exp(-g a / K): for one rank (g = 1), the ranks of a node (g = L), all
        (g = W).
        """
        accesses, touches, passes = rows.accesses, rows.touches, self.shape.micro_batches
        result = np.empty((STATISTICS, len(accesses)))
        result[ROWS], result[SYNCED] = 1.0, passes
        result[ACCESSES] = accesses
        in_pass = independent(accesses / passes, self.layout) if touches is None else touches
        in_step = independent(accesses, self.layout) if touches is None else _in_any_pass(touches, passes)
        result[PER_RANK], result[PER_NODE] = passes * in_pass[0], passes * in_pass[1]
        result[BACK_PER_RANK], result[BACK_PER_NODE], result[ANYWHERE] = in_step
        if rows.trained is not None:
            result[[ANYWHERE, SYNCED, BACK_PER_RANK, BACK_PER_NODE]] *= rows.trained
        return result

    @cached_property
    def total(self) -> Float64Array:
        """float64[STATISTICS] summed over all rows."""
        return self._listed_sum + self._bin_sum

    @cached_property
    def _listed_sum(self) -> Float64Array:
        summed: Float64Array = self.statistics.sum(axis=1)
        return summed

    @cached_property
    def _bin_sum(self) -> Float64Array:
        return self.statistics_of(self.bins) @ self.bin_rows

    def by_tier(self, tiers: UInt8Array, unlisted: Float64Array) -> Float64Array:
        """Return float64[tier, statistic] summed over all rows.

        Args:
            tiers: uint8[h] of the listed rows.
            unlisted: float64[3], rows above HOME that are not listed, by tier.
        """
        sums = np.zeros((len(Tier), STATISTICS))
        sums[Tier.HOME] = self._bin_sum
        if unlisted.any():
            one = self._tail_statistics
            sums += unlisted[:, None] * one
            sums[Tier.HOME] = np.maximum(sums[Tier.HOME] - unlisted.sum() * one, 0.0)
        sums[Tier.HOME] += self._listed_sum
        for tier in (Tier.NODE, Tier.DEVICE):
            moved = self.statistics[:, np.flatnonzero(tiers == tier)].sum(axis=1)
            sums[tier] += moved
            sums[Tier.HOME] -= moved
        return np.maximum(sums, 0.0)

    @property
    def _tail_statistics(self) -> Float64Array:
        """float64[STATISTICS] of a row about which nothing else is known."""
        touches, rows = self.bins.touches, float(self.bin_rows.sum())
        if touches is not None:
            touches = (touches @ self.bin_rows / rows if rows > 0 else np.zeros(3))[:, None]
        trained = self.bins.trained
        if trained is not None:
            trained = np.array([trained @ self.bin_rows / rows if rows > 0 else 1.0])
        return self.statistics_of(RowLoads(np.array([self.tail_accesses]), trained, touches))[:, 0]


def _in_any_pass(touches: Float64Array, passes: int) -> Float64Array:
    if passes == 1:
        return touches
    untouched: Float64Array = np.power(1.0 - touches, passes)
    return 1.0 - untouched


def make_loads(
    profile: Profile,
    keyspace: KeySpace,
    layout: RankLayout,
    shape: TrainingShape | None = None,
    also_list: Int64Array | None = None,
) -> tuple[GroupLoad, ...]:
    """Return one load per dim-group, in the order of ``KeySpace.groups``.

    Args:
        shape: how the job trains; default ``TrainingShape()``.
        also_list: int64[n] keys that are listed whether the profile lists them or not (pinned rows). Of a row that it
            does not list, the mean frequency of its table's unlisted rows is assumed.

    Raises:
        PlanError: the profile's tables are not the key space's, nothing was accessed yet, the accesses of a step are
            unknown, a listed row is outside its table, or a share is negative or not finite.
    """
    shape = shape or TrainingShape()
    if [table.table for table in profile.tables] != [table.name for table in keyspace.tables]:
        raise PlanError(
            f"the profile lists other tables than the key space ({len(profile.tables)} against "
            f"{len(keyspace.tables)}, or in another order)",
            remedy="make the profile with the job's own table list",
        )
    unknown = sorted(shape.frozen_tables - set(keyspace.index))
    if unknown:
        raise PlanError(f"tables that do not exist: {', '.join(unknown)}", remedy="name tables of the job")
    if not any(table.weight > 0 for table in profile.tables):
        raise PlanError("the profile is empty: no access was seen yet", remedy="wait until the stream delivers")
    also = np.empty(0, np.int64) if also_list is None else np.unique(also_list)
    also_table, also_rows = keyspace.table_rows(also)

    def of_table(table: int, group: int) -> GroupLoad:
        more = also_rows[also_table == table]
        return _table_load(profile.tables[table], table, group, keyspace, layout, shape, more)

    return tuple(
        _joined(number, keyspace.tables[group.tables[0]], shape, layout,
                [of_table(table, number) for table in group.tables if profile.tables[table].weight > 0])
        for number, group in enumerate(keyspace.groups)
    )  # fmt: skip


def _check(table: TableProfile, spec: TableSpec) -> None:
    """Raise PlanError, naming the table, for a profile with rows or numbers that no accesses to the table can have."""
    if not math.isfinite(table.accesses_per_step) or table.accesses_per_step < 0:
        raise PlanError(
            f"table {table.table!r}: accesses per step are unknown ({table.accesses_per_step!r})",
            remedy="set planner.batch_accesses_per_step, or wait for the ranks' first report",
        )
    remedy = "make the profile with the job's own table list, from shares and rows that were counted"
    if len(table.hot_rows) and not 0 <= int(table.hot_rows.min()) <= int(table.hot_rows.max()) < spec.rows:
        raise PlanError(f"table {table.table!r}: the profile lists a row outside 0 to {spec.rows - 1}", remedy=remedy)
    arrays = (table.hot_share, *(table.hot_bounds or ()), table.bin_share, table.bin_rows)
    total = sum(float(values.sum()) for values in arrays)
    # Not the other way round: comparisons with NaN are false.
    if not (math.isfinite(total) and all(values.min(initial=0.0) >= 0 for values in arrays)):
        raise PlanError(
            f"table {table.table!r}: the profile has a share or a number of rows below 0 or not finite", remedy=remedy
        )


def _table_load(
    table: TableProfile,
    table_index: int,
    group: int,
    keyspace: KeySpace,
    layout: RankLayout,
    shape: TrainingShape,
    also_rows: Int64Array,
) -> GroupLoad:
    """Return the load of one table, its keys in the order of its profile."""
    _check(table, keyspace.tables[table_index])
    shares = np.stack([table.hot_share, table.hot_lower, table.hot_upper]).astype(np.float64)
    rows = table.hot_rows
    bin_share, bin_rows = table.bin_share.astype(np.float64), table.bin_rows.astype(np.float64)
    # Accesses that neither rows nor bins explain are spread evenly over the rest of the table, which favours
    # replicas least.
    rest_share = 1.0 - float(shares[0].sum()) - float(bin_share @ bin_rows)
    if rest_share > 1e-9:
        unlisted = max(keyspace.tables[table_index].rows - len(rows) - float(bin_rows.sum()), 1.0)
        bin_share = np.append(bin_share, rest_share / unlisted)
        bin_rows = np.append(bin_rows, unlisted)
    more = also_rows[~np.isin(also_rows, rows)] if len(also_rows) else also_rows
    if len(more):
        unlisted = float(bin_rows.sum())
        mean = float(bin_share @ bin_rows) / unlisted if unlisted > 0 else 0.0
        rows = np.concatenate([rows, more])
        shares = np.concatenate([shares, np.full((3, len(more)), mean)], axis=1)
        bin_rows = bin_rows * max(1.0 - len(more) / unlisted, 0.0) if unlisted > 0 else bin_rows
    per_rank = table.accesses_per_step / layout.world_size
    touches = bin_touches = None
    in_pass = per_rank / shape.micro_batches
    if (measured := measured_touches(table, layout, in_pass)) is not None:
        measured = np.concatenate([measured, np.full((3, len(more)), np.nan)], axis=1)
        relation = TouchRelation.fit(shares[0] * in_pass, measured, layout)
        touches, bin_touches = relation.completed(shares[0] * in_pass, measured), relation.touches(bin_share * in_pass)
    frozen, (listed, lower, upper), bins = table.table in shape.frozen_tables, shares * per_rank, bin_share * per_rank
    return GroupLoad(
        group, keyspace.tables[table_index], shape, layout, keyspace.keys(table_index, rows),
        RowLoads(listed, np.zeros(len(listed)) if frozen else None, touches),
        np.stack([np.minimum(lower, listed), np.maximum(upper, listed)]),
        RowLoads(bins, np.zeros(len(bins)) if frozen else None, bin_touches),
        bin_rows,
    )  # fmt: skip


def _joined(
    group: int, spec: TableSpec, shape: TrainingShape, layout: RankLayout, parts: Sequence[GroupLoad]
) -> GroupLoad:
    """Return the load of a dim-group from those of its tables."""
    keys = np.concatenate([np.empty(0, np.int64), *(part.keys for part in parts)])
    # Hot rows come by frequency; most callers want them by key.
    order = np.argsort(keys, kind="stable")
    listed = _concatenated([part.listed for part in parts], shape, layout)
    bounds = np.concatenate([np.empty((2, 0)), *(part.bounds for part in parts)], axis=1)
    return GroupLoad(
        group, spec, shape, layout, keys[order],
        RowLoads(
            listed.accesses[order],
            None if listed.trained is None else listed.trained[order],
            None if listed.touches is None else listed.touches[:, order],
        ),
        bounds[:, order],
        _concatenated([part.bins for part in parts], shape, layout),
        np.concatenate([np.empty(0), *(part.bin_rows for part in parts)]),
    )  # fmt: skip


def _concatenated(parts: Sequence[RowLoads], shape: TrainingShape, layout: RankLayout) -> RowLoads:
    accesses = np.concatenate([np.empty(0), *(part.accesses for part in parts)])
    trained = touches = None
    if any(part.trained is not None for part in parts):
        trained = np.concatenate([np.ones(len(p.accesses)) if p.trained is None else p.trained for p in parts])
    if any(part.touches is not None for part in parts):
        passes = shape.micro_batches
        each = [independent(p.accesses / passes, layout) if p.touches is None else p.touches for p in parts]
        touches = np.concatenate(each, axis=1)
    return RowLoads(accesses, trained, touches)
