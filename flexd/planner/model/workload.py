"""Load of each dim-group from a profile: expected look-ups of each row by a rank in one step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.planner.model.touches import TouchRelation, independent, measured_touches, rescaled
from flexd.planner.model.training_shape import TrainingShape
from flexd.sketch.profile import Profile, TableProfile

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

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
forward passes, in each of which its touched bit travels, if it is trained. The BACK ones count what travels in the
backward pass.
"""
STATISTICS = 8


@dataclass(frozen=True)
class GroupLoad:
    """The expected accesses to the rows of one dim-group, per rank and optimizer step.

    Attributes:
        group: index into ``KeySpace.groups``.
        row_bytes: one row's values.
        state_bytes: one row's optimizer state.
        keys: int64[h], rows listed one by one, ascending.
        accesses, accesses_lower, accesses_upper: float64[h], estimate and bounds.
        bin_accesses, bin_rows: float64[k], accesses of one row of each frequency bin of the other rows, and its rows.
        comm_row_bytes: one row's values on the wire; 0: as stored.
        sums_at_home: gradients of copies are summed at their homes instead of all-reduced, as ``TrainingShape`` says.
        micro_batches, merged_backward: of the training shape.
        trained: float64[h], 0 for rows of frozen tables. None: 1 for all.
        bin_trained: float64[k], the same for the bins.
        touches: float64[3, h], touches of the listed rows in one forward pass (``touches``). None: independence.
        bin_touches: float64[3, k], those of one row of each bin.
    """

    group: int
    row_bytes: int
    state_bytes: int
    keys: Int64Array
    accesses: Float64Array
    accesses_lower: Float64Array
    accesses_upper: Float64Array
    bin_accesses: Float64Array
    bin_rows: Float64Array
    comm_row_bytes: int = 0
    sums_at_home: bool = False
    micro_batches: int = 1
    merged_backward: bool = False
    trained: Float64Array | None = None
    bin_trained: Float64Array | None = None
    touches: Float64Array | None = None
    bin_touches: Float64Array | None = None

    @property
    def wire_bytes(self) -> int:
        """Bytes of one row in a message."""
        return self.comm_row_bytes or self.row_bytes

    @property
    def tail_accesses(self) -> float:
        """Mean accesses of an unlisted row, assumed for rows about which nothing else is known."""
        rows = float(self.bin_rows.sum())
        return float(self.bin_accesses @ self.bin_rows) / rows if rows > 0 else 0.0

    def listed_statistics(self, layout: RankLayout, accesses: Float64Array | None = None) -> Float64Array:
        """Return float64[STATISTICS, h] of the listed rows, with their estimates unless other accesses are given."""
        touches = self.touches
        if accesses is None:
            accesses = self.accesses
        elif touches is not None:
            passes = self.micro_batches
            touches = rescaled(touches, self.accesses / passes, accesses / passes, layout)
        return self._statistics(accesses, layout, self.trained, touches)

    def bin_statistics(self, layout: RankLayout) -> Float64Array:
        """Return float64[STATISTICS, k] of one row of each bin."""
        return self._statistics(self.bin_accesses, layout, self.bin_trained, self.bin_touches)

    def tail_statistics(self, layout: RankLayout) -> Float64Array:
        """Return float64[STATISTICS] of a trained row about which nothing else is known."""
        touches, rows = self.bin_touches, float(self.bin_rows.sum())
        if touches is not None:
            touches = (touches @ self.bin_rows / rows if rows > 0 else np.zeros(3))[:, None]
        return self._statistics(np.array([self.tail_accesses]), layout, None, touches)[:, 0]

    def _statistics(
        self,
        accesses: Float64Array,
        layout: RankLayout,
        trained: Float64Array | None,
        touches: Float64Array | None,
    ) -> Float64Array:
        """Return float64[STATISTICS, n] of float64[n] accesses per rank and optimizer step.

        In each of K micro-batches a / K of the look-ups happen. The passes of a step are taken as independent of each
        other. See docs/cost-model.md.

        Args:
            touches: float64[3, n] of one forward pass. None: a row that each of g ranks looks up Poisson(a / K) times
                is among their keys with probability 1 - exp(-g a / K): for one rank (g = 1), the ranks of a node
                (g = L), all (g = W).
        """
        result = np.empty((STATISTICS, len(accesses)))
        result[ROWS], result[SYNCED] = 1.0, self.micro_batches
        result[ACCESSES] = accesses
        in_pass = independent(accesses / self.micro_batches, layout) if touches is None else touches
        in_step = independent(accesses, layout) if touches is None else _in_any_pass(touches, self.micro_batches)
        for at, (forward, backward) in enumerate(((PER_RANK, BACK_PER_RANK), (PER_NODE, BACK_PER_NODE))):
            result[forward] = self.micro_batches * in_pass[at]
            result[backward] = in_step[at] if self.merged_backward else result[forward]
        result[ANYWHERE] = in_step[2]
        if trained is not None:
            for statistic in (ANYWHERE, SYNCED, BACK_PER_RANK, BACK_PER_NODE):
                result[statistic] *= trained
        return result


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
            unknown, or a share is NaN, negative or of a row outside its table.
    """
    shape = shape or TrainingShape()
    parts = _table_loads(profile, keyspace, layout, shape, also_list)
    return tuple(
        _load(index, [parts[table] for table in group.tables if table in parts], keyspace, layout, shape)
        for index, group in enumerate(keyspace.groups)
    )


def make_table_loads(
    profile: Profile, keyspace: KeySpace, layout: RankLayout, shape: TrainingShape | None = None
) -> tuple[GroupLoad, ...]:
    """Return one load per table, as ``make_loads``, for strategies that place tables; ``group`` is the dim-group.

    Raises:
        PlanError: as ``make_loads``.
    """
    shape = shape or TrainingShape()
    parts = _table_loads(profile, keyspace, layout, shape, None)
    group_of = {table: index for index, group in enumerate(keyspace.groups) for table in group.tables}
    return tuple(
        _load(group_of[table], [parts[table]] if table in parts else [], keyspace, layout, shape, table)
        for table in range(len(keyspace.tables))
    )


@dataclass(frozen=True)
class _TableLoad:
    keys: Int64Array
    hot: Float64Array
    """float64[3, h]: estimate, lower, upper."""
    bin_accesses: Float64Array
    bin_rows: Float64Array
    trained: float
    touches: Float64Array | None
    """float64[3, h]."""
    bin_touches: Float64Array | None


def _table_loads(
    profile: Profile, keyspace: KeySpace, layout: RankLayout, shape: TrainingShape, also_list: Int64Array | None
) -> dict[int, _TableLoad]:
    """Return the loads of the tables that have accesses, by index of the table."""
    names = [table.table for table in profile.tables]
    if names != [table.name for table in keyspace.tables]:
        raise PlanError(
            f"the profile lists other tables than the key space ({len(names)} against {len(keyspace.tables)}, or in "
            "another order)",
            remedy="make the profile with the job's own table list",
        )
    shape.check_names(keyspace)
    if not any(table.weight > 0 for table in profile.tables):
        raise PlanError("the profile is empty: no access was seen yet", remedy="wait until the stream delivers")
    also = np.empty(0, np.int64) if also_list is None else np.unique(also_list)
    also_table, also_rows = keyspace.table_rows(also)
    parts = {}
    for index, table in enumerate(profile.tables):
        if table.weight > 0:
            parts[index] = _table_load(table, index, keyspace, layout, shape, also_rows[also_table == index])
    return parts


def _table_load(
    table: TableProfile,
    table_index: int,
    keyspace: KeySpace,
    layout: RankLayout,
    shape: TrainingShape,
    also_rows: Int64Array,
) -> _TableLoad:
    _check_table(table, keyspace.tables[table_index].rows)
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
    return _TableLoad(
        keys=keyspace.keys(table_index, rows),
        hot=shares * per_rank,
        bin_accesses=bin_share * per_rank,
        bin_rows=bin_rows,
        trained=0.0 if table.table in shape.frozen_tables else 1.0,
        touches=touches,
        bin_touches=bin_touches,
    )


def _check_table(table: TableProfile, table_rows: int) -> None:
    if not math.isfinite(table.accesses_per_step) or table.accesses_per_step < 0:
        raise PlanError(
            f"table {table.table!r}: accesses per step are unknown ({table.accesses_per_step!r})",
            remedy="set planner.batch_accesses_per_step, or wait for the ranks' first report",
        )
    rows = table.hot_rows
    if not all(
        np.isfinite(share).all() and (share >= 0).all() for share in (table.hot_share, table.hot_lower, table.hot_upper)
    ):
        raise PlanError(f"table {table.table!r}: a hot row's share is NaN or negative", remedy="report this profile")
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= table_rows):
        raise PlanError(f"table {table.table!r}: a hot row lies outside the table", remedy="check the table's rows")
    ascending = np.sort(rows)
    if bool((ascending[1:] == ascending[:-1]).any()):
        raise PlanError(f"table {table.table!r}: a hot row is listed twice", remedy="report this profile")
    for bins in (table.bin_share, table.bin_rows):
        if not (np.isfinite(bins).all() and (bins >= 0).all()):
            raise PlanError(f"table {table.table!r}: a bin is NaN or negative", remedy="report this profile")


def _load(
    group_index: int,
    parts: list[_TableLoad],
    keyspace: KeySpace,
    layout: RankLayout,
    shape: TrainingShape,
    table: int | None = None,
) -> GroupLoad:
    spec = keyspace.tables[keyspace.groups[group_index].tables[0] if table is None else table]
    keys = np.concatenate([np.empty(0, np.int64), *(part.keys for part in parts)])
    hot = np.concatenate([np.empty((3, 0)), *(part.hot for part in parts)], axis=1)
    # Hot rows come by frequency; most callers want them by key.
    order = np.argsort(keys, kind="stable")
    plain = all(part.trained == 1.0 for part in parts)

    def trained(rows: list[int]) -> Float64Array | None:
        return None if plain else np.repeat([part.trained for part in parts], rows)

    def touches(accesses: list[Float64Array], known: list[Float64Array | None]) -> Float64Array:
        passes = shape.micro_batches
        every = [
            independent(a / passes, layout) if measured is None else measured
            for a, measured in zip(accesses, known, strict=True)
        ]
        return np.concatenate([np.empty((3, 0)), *every], axis=1)

    of_keys = trained([len(part.keys) for part in parts])
    all_independent = all(part.touches is None for part in parts)
    return GroupLoad(
        group=group_index,
        row_bytes=spec.row_bytes,
        state_bytes=spec.state_bytes,
        keys=keys[order],
        accesses=hot[0, order],
        accesses_lower=np.minimum(hot[1, order], hot[0, order]),
        accesses_upper=np.maximum(hot[2, order], hot[0, order]),
        bin_accesses=np.concatenate([np.empty(0), *(part.bin_accesses for part in parts)]),
        bin_rows=np.concatenate([np.empty(0), *(part.bin_rows for part in parts)]),
        comm_row_bytes=shape.wire_row_bytes(spec),
        sums_at_home=shape.narrow_wire(spec),
        micro_batches=shape.micro_batches,
        merged_backward=shape.merged_backward,
        trained=None if of_keys is None else of_keys[order],
        bin_trained=trained([len(part.bin_rows) for part in parts]),
        touches=None
        if all_independent
        else touches([part.hot[0] for part in parts], [part.touches for part in parts])[:, order],
        bin_touches=None
        if all_independent
        else touches([part.bin_accesses for part in parts], [part.bin_touches for part in parts]),
    )
