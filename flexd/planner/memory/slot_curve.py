"""What replica slots save, as a function of their number: the gains of rows at tiers, the best per slot first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.gains import usable_tiers
from flexd.planner.model.row_bytes import Exchange

Float64Array = npt.NDArray[np.float64]

DIRECTORY_BYTES = 10
"""Of a replica slot beside its row and state: the room of its row in the directory (``rank_memory``)."""


@dataclass(frozen=True)
class SlotCurve:
    """Replica slots of one dim-group on a rank, in the mean over the ranks.

    Attributes:
        slots: float64[s], taken by one row that rises to a tier, of its rank's.
        seconds: float64[s], exposed seconds a step that it saves, the most a slot first.
        slot_bytes: of one slot.
    """

    slots: Float64Array
    seconds: Float64Array
    slot_bytes: int

    @classmethod
    def of(cls, gains: Float64Array, layout: RankLayout, exchange: Exchange, row_and_state_bytes: int) -> SlotCurve:
        """Make the curve from float64[tier, h] seconds that each row saves at each tier against HOME.

        A row's gains over its slots are replaced by their concave hull: the linear relaxation of a multiple-choice
        knapsack (Sinha, Zoltners: The multiple-choice knapsack problem, Operations Research 27(3), 1979).
        """
        world = layout.world_size
        of_tier = {Tier.NODE: (layout.nodes - 1) / world, Tier.DEVICE: (world - 1) / world}
        tiers = [tier for tier in usable_tiers(layout, exchange) if of_tier[tier] > 0]
        slots, seconds = [np.empty(0)], [np.empty(0)]
        if len(tiers) == 1:
            slots, seconds = [np.full(gains.shape[1], of_tier[tiers[0]])], [gains[tiers[0]]]
        elif tiers:
            node, device = (of_tier[tier] for tier in tiers)
            low, high = gains[tiers[0]], gains[tiers[1]]
            # By way of NODE only where that lies above the straight line to DEVICE.
            bent = low / node > high / device
            slots = [np.where(bent, node, device), np.full(len(low), device - node)]
            seconds = [np.where(bent, low, high), np.where(bent, high - low, 0.0)]
        taken, saved = np.concatenate(slots), np.concatenate(seconds)
        useful = np.flatnonzero((saved > 0) & (taken > 0))
        order = useful[np.argsort(-saved[useful] / taken[useful], kind="stable")]
        return cls(taken[order], saved[order], row_and_state_bytes + DIRECTORY_BYTES)

    def saved_seconds(self, slots: float) -> float:
        """Return the exposed seconds a step that so many slots save."""
        before = np.cumsum(self.slots) - self.slots
        filled = np.clip(slots - before, 0.0, self.slots)
        return float((self.seconds / self.slots) @ filled) if len(self.slots) else 0.0
