"""The profile as the cost model needs it: per dim-group, how often a rank looks each row up in one step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.errors import PlanError
from flexd.keyspace import KeySpace
from flexd.layout import RankLayout
from flexd.sketch.profile import Profile, TableProfile

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

ROWS, ACCESSES, PER_RANK, PER_NODE, ANYWHERE = range(5)
"""Statistics of rows: 1 (so that sums count rows), accesses a, and the expected distinct rows u, v, w."""
STATISTICS = 5


@dataclass(frozen=True)
class GroupLoad:
    """The expected accesses to the rows of one dim-group, per rank and step.

    Attributes:
        group: index into ``KeySpace.groups``.
        row_bytes: one row's values.
        state_bytes: one row's optimizer state.
        keys: int64[h], rows listed one by one, ascending.
        accesses, accesses_lower, accesses_upper: float64[h], estimate and bounds.
        bin_accesses, bin_rows: float64[k], accesses of one row of each frequency bin of the other rows, and its rows.
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

    @property
    def tail_accesses(self) -> float:
        """Mean accesses of a row that is not listed; what is assumed of one about which nothing else is known."""
        rows = float(self.bin_rows.sum())
        return float(self.bin_accesses @ self.bin_rows) / rows if rows > 0 else 0.0


def statistics(accesses: Float64Array, layout: RankLayout) -> Float64Array:
    """float64[n] accesses per rank and step -> float64[5, n]: (1, a, u, v, w).

    A row that each of g ranks looks up Poisson(a) times is among their keys with probability 1 - exp(-g a):
    u for one rank (g = 1), v for the ranks of a node (g = L), w for all (g = W). See docs/cost-model.md.
    """
    result = np.empty((STATISTICS, len(accesses)))
    result[ROWS] = 1.0
    result[ACCESSES] = accesses
    for row, ranks in ((PER_RANK, 1), (PER_NODE, layout.local_ranks), (ANYWHERE, layout.world_size)):
        result[row] = -np.expm1(-ranks * accesses)
    return result


def make_loads(profile: Profile, keyspace: KeySpace, layout: RankLayout) -> tuple[GroupLoad, ...]:
    """One load per dim-group, in the order of ``KeySpace.groups``.

    Raises:
        PlanError: the profile's tables are not the key space's, nothing was accessed yet, the accesses of a step are
            unknown, or a share is NaN, negative or of a row outside its table.
    """
    names = [table.table for table in profile.tables]
    if names != [table.name for table in keyspace.tables]:
        raise PlanError(
            f"the profile lists other tables than the key space ({len(names)} against {len(keyspace.tables)}, or in "
            "another order)",
            remedy="make the profile with the job's own table list",
        )
    if not any(table.weight > 0 for table in profile.tables):
        raise PlanError("the profile is empty: no access was seen yet", remedy="wait until the stream delivers")
    parts: list[list[_TablePart]] = [[] for _ in keyspace.groups]
    for group_index, group in enumerate(keyspace.groups):
        for table_index in group.tables:
            table = profile.tables[table_index]
            if table.weight > 0:
                parts[group_index].append(_table_part(table, table_index, keyspace, layout))
    return tuple(_group_load(i, parts[i], keyspace) for i in range(len(parts)))


@dataclass(frozen=True)
class _TablePart:
    keys: Int64Array
    hot: Float64Array
    """float64[3, h]: estimate, lower, upper."""
    bin_accesses: Float64Array
    bin_rows: Float64Array


def _table_part(table: TableProfile, table_index: int, keyspace: KeySpace, layout: RankLayout) -> _TablePart:
    if not math.isfinite(table.accesses_per_step) or table.accesses_per_step < 0:
        raise PlanError(
            f"table {table.table!r}: accesses per step are unknown ({table.accesses_per_step!r})",
            remedy="set planner.batch_accesses_per_step, or wait for the ranks' first report",
        )
    shares = np.stack([table.hot_share, table.hot_lower, table.hot_upper]).astype(np.float64)
    rows = table.hot_rows
    if not (np.isfinite(shares).all() and (shares >= 0).all()):
        raise PlanError(f"table {table.table!r}: a hot row's share is NaN or negative", remedy="report this profile")
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= keyspace.tables[table_index].rows):
        raise PlanError(f"table {table.table!r}: a hot row lies outside the table", remedy="check the table's rows")
    ascending = np.sort(rows)
    if bool((ascending[1:] == ascending[:-1]).any()):
        raise PlanError(f"table {table.table!r}: a hot row is listed twice", remedy="report this profile")
    bin_share, bin_rows = table.bin_share.astype(np.float64), table.bin_rows.astype(np.float64)
    if not (np.isfinite(bin_share).all() and np.isfinite(bin_rows).all() and min(bin_share.min(initial=0), 0) >= 0):
        raise PlanError(f"table {table.table!r}: a bin is NaN or negative", remedy="report this profile")
    # What neither rows nor bins explain is spread evenly over the rest of the table: the least favourable to replicas.
    rest_share = 1.0 - float(shares[0].sum()) - float(bin_share @ bin_rows)
    if rest_share > 1e-9:
        unlisted = max(keyspace.tables[table_index].rows - len(rows) - float(bin_rows.sum()), 1.0)
        bin_share = np.append(bin_share, rest_share / unlisted)
        bin_rows = np.append(bin_rows, unlisted)
    per_rank = table.accesses_per_step / layout.world_size
    return _TablePart(
        keys=keyspace.keys(table_index, rows),
        hot=shares * per_rank,
        bin_accesses=bin_share * per_rank,
        bin_rows=bin_rows,
    )


def _group_load(group_index: int, parts: list[_TablePart], keyspace: KeySpace) -> GroupLoad:
    table = keyspace.tables[keyspace.groups[group_index].tables[0]]
    keys = np.concatenate([np.empty(0, np.int64), *(part.keys for part in parts)])
    hot = np.concatenate([np.empty((3, 0)), *(part.hot for part in parts)], axis=1)
    order = np.argsort(keys, kind="stable")
    return GroupLoad(
        group=group_index,
        row_bytes=table.row_bytes,
        state_bytes=table.state_bytes,
        keys=keys[order],
        accesses=hot[0, order],
        accesses_lower=np.minimum(hot[1, order], hot[0, order]),
        accesses_upper=np.maximum(hot[2, order], hot[0, order]),
        bin_accesses=np.concatenate([np.empty(0), *(part.bin_accesses for part in parts)]),
        bin_rows=np.concatenate([np.empty(0), *(part.bin_rows for part in parts)]),
    )
