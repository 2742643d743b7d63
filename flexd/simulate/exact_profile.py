"""Count a profile exactly from the accesses of some steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.simulate.step_keys import StepKeys
from flexd.sketch.profile import Profile, RowTouches, TableProfile

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


def exact_profile(
    passes: Sequence[Sequence[Int64Array]],
    keyspace: KeySpace,
    layout: RankLayout | None = None,
    micro_batches: int = 1,
) -> Profile:
    """Return a profile that lists every row that was looked up, with its exact share.

    Args:
        passes: by forward pass and rank, int64 [n] keys.
        layout: of the ranks. With it the profile has the touches of every row in a pass, counted in these.
        micro_batches: passes of a step.

    Raises:
        PlanError: no passes, or no access in them.
    """
    keys = [mine for ranks in passes for mine in ranks]
    total = sum(len(mine) for mine in keys)
    if not total:
        raise PlanError("no accesses to count", remedy="replay more steps, or larger batches")
    rows, counts = np.unique(np.concatenate(keys), return_counts=True)
    table_of = keyspace.table_of(rows)
    touches = None if layout is None else _touches(passes, rows, layout)
    made = []
    for index, table in enumerate(keyspace.tables):
        mine = np.flatnonzero(table_of == index)
        mine = mine[np.argsort(-counts[mine], kind="stable")]
        weight = float(counts[mine].sum())
        share = counts[mine] / weight if weight else np.empty(0)
        made.append(
            TableProfile(
                table=table.name,
                rows=table.rows,
                weight=weight,
                accesses_per_step=weight * micro_batches / len(passes),
                hot_rows=rows[mine] - keyspace.first_key[index],
                hot_share=share,
                bin_share=np.empty(0),
                bin_rows=np.empty(0),
                distinct_rows=float(len(mine)),
                touches=None
                if layout is None or touches is None
                else RowTouches(layout.nodes, layout.local_ranks, *touches[:, mine]),
            )
        )
    return Profile(tuple(made), samples=total)


def _touches(passes: Sequence[Sequence[Int64Array]], rows: Int64Array, layout: RankLayout) -> Float64Array:
    """Return float64[3, rows]: means a pass over the ranks, over the nodes, and of the job."""
    counts = np.zeros((3, len(rows)))
    for ranks in passes:
        keys = StepKeys.of(ranks, layout)
        at = np.searchsorted(rows, keys.rows)
        counts[0, at] += np.bincount(keys.pair_row, minlength=len(at))
        counts[1, at] += np.bincount(keys.node_row, minlength=len(at))
        counts[2, at] += 1
    touches: Float64Array = counts / (len(passes) * np.array([[layout.world_size], [layout.nodes], [1]]))
    return touches
