"""Read-only tables that are copied to every rank as wholes, so that their look-ups leave the exchange.

A copy of a read-only row costs memory and one delivery, nothing per step. Where a plan copies most of what is looked
up in such a table, its other rows are copied as well if they fit: no id of the table is sent then.
"""

from collections.abc import Sequence

import numpy as np

from flexd.core.arrays import Int64Array
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Placement, RankLayout, Tier
from flexd.core.sharding_types import ROW_WISE
from flexd.planner.model.cost import canonical_tiers
from flexd.planner.solver.assign import PlanLimits, slots_used
from flexd.sketch.profile import Profile

MAX_ROWS = 2**20
"""Of a table that is copied as a whole: every rank lists its rows one by one."""
# Of a table's look-ups: with fewer copied, the rest is no small remainder.
_MOST = 0.9


def with_copies(target: Placement, keys: Int64Array, layout: RankLayout) -> Placement:
    """Return the placement with a copy of these rows on every rank."""
    others = ~np.isin(target.keys, keys)
    everywhere = canonical_tiers(np.full(len(keys), Tier.DEVICE, np.uint8), layout)
    return Placement.of(
        np.concatenate([target.keys[others], keys]), np.concatenate([target.tiers[others], everywhere]), target.version
    )


def whole_tables(
    target: Placement,
    profile: Profile,
    keyspace: KeySpace,
    layout: RankLayout,
    limits: PlanLimits,
    slots: Sequence[int],
    memory_bytes: int | None,
) -> Int64Array:
    """Return int64[n] keys of read-only tables that a plan almost copies to every rank, and of which the rest fits.

    Args:
        target: of the plan.
        slots: replica slots of a rank, by dim-group.
        memory_bytes: of a rank for copies; None: the slots alone are limits.
    """
    named = limits.exclude_tables.union(pin.table for pin in limits.pins)
    found, everywhere = np.empty(0, np.int64), canonical_tiers(np.array([Tier.DEVICE], np.uint8), layout)[0]
    on_all = target.keys[target.tiers == everywhere]
    for number, spec in enumerate(keyspace.tables):
        seen = profile.tables[number]
        if spec.name not in keyspace.read_only or spec.sharding != ROW_WISE or spec.rows > MAX_ROWS:
            continue
        if spec.name in named or not seen.weight > 0:
            continue
        copied = np.isin(keyspace.keys(number, seen.hot_rows), on_all)
        if float(seen.hot_share[copied].sum()) < _MOST:
            continue
        more = np.setdiff1d(keyspace.keys(number, np.arange(spec.rows)), on_all)
        wanted = np.union1d(found, more)
        placed = with_copies(target, wanted, layout)
        used = slots_used(placed.keys, placed.tiers, keyspace, layout)
        bytes_used = (np.array(keyspace.copy_bytes)[:, None] * used).sum(axis=0).max(initial=0)
        fits = bool((used <= np.array(slots)[:, None]).all())
        if fits and (memory_bytes is None or bytes_used <= memory_bytes):
            found = wanted
    return found
