"""Order the changes from the live placement to a plan, and split them into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array
from flexd.core.errors import PlanError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout, Tier, by_slots, is_rehomed, without_moves
from flexd.core.placement import Delta, Placement
from flexd.planner.solver.limits import slots_used

_MIN_BLOCK_ROWS = 64
_MAX_BLOCKS = 512


def moved_bytes(delta: Delta, keyspace: KeySpace, layout: RankLayout) -> Int64Array:
    """Return int64[n]: bytes of values and optimizer state that each change moves; 0 if it only drops copies. A row
    that leaves a node to which it moved goes by way of its home."""
    copies = np.array([1, layout.nodes, layout.world_size])
    payload = np.array(
        [
            keyspace.tables[group.tables[0]].row_bytes + keyspace.tables[group.tables[0]].state_bytes
            for group in keyspace.groups
        ],
        dtype=np.int64,
    )
    promoted = copies[without_moves(delta.new_tiers)] > copies[without_moves(delta.old_tiers)]
    times = promoted.astype(np.int64) + is_rehomed(delta.old_tiers) + is_rehomed(delta.new_tiers)
    moved: Int64Array = times * payload[keyspace.group_of(delta.keys)]
    return moved


def plan_delta(
    live: Placement,
    target: Placement,
    gains: Float64Array,
    keyspace: KeySpace,
    layout: RankLayout,
    replica_slots: Sequence[int],
) -> Delta:
    """Return the changes from ``live`` to ``target``, the most useful first.

    Promotions, and rows that move to other nodes, come by gain per byte; demotions, and rows that come home, as late
    as the slots that those need allow. Every prefix leaves every rank within its slots (unless ``live`` does not: then
    demotions come first until it does).

    Args:
        gains: float64[len(target)], of each row of ``target`` at its tier.
        replica_slots: of a rank, by dim-group.

    Raises:
        PlanError: the target itself takes more slots than there are.
    """
    slots = np.array(replica_slots, dtype=np.int64)[:, None]
    if bool((slots_used(target.keys, target.tiers, keyspace, layout) > slots).any()):
        raise PlanError("the plan takes more replica slots than the ranks have", remedy="plan again with these slots")
    changes = live.delta_to(target)
    up = by_slots(changes.new_tiers) > by_slots(changes.old_tiers)
    demotions, promotions = changes.select(np.flatnonzero(~up)), changes.select(np.flatnonzero(up))
    order = _by_gain(promotions, target, gains, keyspace, layout)
    promotions = promotions.select(order)
    block = max(_MIN_BLOCK_ROWS, -(-len(changes) // _MAX_BLOCKS))
    freed = _cumulative(demotions, block, keyspace, layout)
    taken = _cumulative(promotions, block, keyspace, layout)
    used = slots_used(live.keys, live.tiers, keyspace, layout)
    pieces: list[Delta] = []
    done = 0
    for i in range(1, len(taken)):
        while done + 1 < len(freed) and bool((used + freed[done] + taken[i] > slots).any()):
            pieces.append(demotions.select(slice(done * block, (done + 1) * block)))
            done += 1
        pieces.append(promotions.select(slice((i - 1) * block, i * block)))
    pieces.append(demotions.select(slice(done * block, None)))
    return Delta(
        np.concatenate([piece.keys for piece in pieces]),
        np.concatenate([piece.old_tiers for piece in pieces]),
        np.concatenate([piece.new_tiers for piece in pieces]),
    )


def delta_chunks(
    delta: Delta, keyspace: KeySpace, layout: RankLayout, rows_per_chunk: int, bytes_per_chunk: int
) -> Iterator[Delta]:
    """Yield successive slices of at most ``rows_per_chunk`` rows that move at most ``bytes_per_chunk``.

    One row is always allowed, however large.
    """
    rows_per_chunk = max(1, rows_per_chunk)
    moved = np.cumsum(moved_bytes(delta, keyspace, layout))
    start = 0
    while start < len(delta):
        before = int(moved[start - 1]) if start else 0
        by_bytes = int(np.searchsorted(moved, before + bytes_per_chunk, side="right"))
        end = min(max(by_bytes, start + 1), start + rows_per_chunk, len(delta))
        yield delta.select(slice(start, end))
        start = end


def _by_gain(
    promotions: Delta, target: Placement, gains: Float64Array, keyspace: KeySpace, layout: RankLayout
) -> Int64Array:
    """Return the order of the promotions: gain per byte moved, largest first; equal ones by key."""
    gain = gains[np.searchsorted(target.keys, promotions.keys)]
    density = gain / np.maximum(moved_bytes(promotions, keyspace, layout), 1)
    return np.lexsort((promotions.keys, -density)).astype(np.int64)


def _cumulative(delta: Delta, block: int, keyspace: KeySpace, layout: RankLayout) -> Int64Array:
    """Return int64[blocks + 1, groups, world_size]: slots used (below 0: freed) by the first i blocks."""
    changes = [np.zeros((len(keyspace.groups), layout.world_size), np.int64)]
    for start in range(0, len(delta), block):
        part = delta.select(slice(start, start + block))
        new, old = (slots_used(part.keys, tiers, keyspace, layout) for tiers in (part.new_tiers, part.old_tiers))
        changes.append(new - old)
    return np.cumsum(np.stack(changes), axis=0)


def rows_by_tier(placement: Placement) -> dict[str, int]:
    """Return the number of rows above HOME, by the name of their tier."""
    return {tier.name: int(np.count_nonzero(placement.tiers == tier)) for tier in (Tier.NODE, Tier.DEVICE)}
