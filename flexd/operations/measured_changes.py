"""What of an executed plan a verification measures, and of which kind the plan is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import KeySpace
from flexd.core.layout import MOVED, RankLayout, Tier, by_slots
from flexd.core.placement import Delta, Placement
from flexd.planner.delta import moved_bytes
from flexd.planner.plan import Plan

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class MeasuredChanges:
    """The two placements between which a verification alternates: that of the plan, and the one here.

    Attributes:
        without: the placement of the plan with (a random part of) its changes undone.
        part: share of the measured changes that are undone; 0.0 if there is nothing to measure.
        takes_back: whether the plan rather takes copies back. All its changes are measured then, otherwise the rows
            that it promoted or moved: what it takes back for them cannot return while their slots are full.
    """

    without: Placement
    part: float
    takes_back: bool


def measured_changes(
    base: Placement, placement: Placement, keyspace: KeySpace, layout: RankLayout, max_move_bytes: int
) -> MeasuredChanges:
    """Return what to measure of the plan that led from ``base`` to ``placement``.

    Args:
        max_move_bytes: largest number of bytes of values and optimizer state that one change of blocks copies.
    """
    undone = placement.delta_to(base)
    takes_back = _takes_back(undone.new_tiers, undone.old_tiers)
    if not takes_back:
        undone = undone.select(np.flatnonzero(by_slots(undone.new_tiers) < by_slots(undone.old_tiers)))
    if len(undone) == 0:
        return MeasuredChanges(placement, 0.0, takes_back)
    done = Delta(undone.keys, undone.new_tiers, undone.old_tiers)
    size = max(int(moved_bytes(way, keyspace, layout).sum()) for way in (done, undone))
    rows = len(undone)
    if size > max_move_bytes:
        rows = max(1, int(rows * max_move_bytes / size))
        undone = undone.select(np.sort(np.random.default_rng().choice(len(undone), rows, replace=False)))
    return MeasuredChanges(placement.apply(undone), rows / len(done), takes_back)


def plan_kind(plan: Plan) -> str:
    """Return ``HOME`` for a plan that takes back more rows than it promotes or moves. Of others, the tiers to which
    they promote, such as ``NODE+DEVICE``, with ``MOVED`` if they move rows to other nodes; empty if there is nothing
    of these."""
    delta = plan.delta
    if _takes_back(delta.old_tiers, delta.new_tiers):
        return Tier.HOME.name
    promoted = delta.new_tiers[by_slots(delta.new_tiers) > by_slots(delta.old_tiers)]
    return "+".join("MOVED" if tier == MOVED else Tier(tier).name for tier in np.unique(np.minimum(promoted, MOVED)))


def _takes_back(before: UInt8Array, after: UInt8Array) -> bool:
    slots_before, slots_after = by_slots(before), by_slots(after)
    return int((slots_after < slots_before).sum()) > int((slots_after > slots_before).sum())
