"""Divide the cache slots of a rank between its dim-groups by their misses, while it trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from flexd.embedding.row_optimizers import RowUpdate
from flexd.embedding.step import StepMoments
from flexd.embedding.store.slow.fast_memory import CACHE_SLOT_BYTES, divide_cache_slots, total_misses
from flexd.embedding.store.slow.tiered_rows import TieredRows
from flexd.embedding.store.store import GroupStore

logger = logging.getLogger(__name__)

LEAST_GAIN = 0.03
"""Share of the expected misses that a new division must save: each change copies all cache slots of a dim-group."""
EVERY = 0.5
"""Divisions are compared each time that look-ups have used rows of so many times the bytes of all cache slots..."""
LEAST_STEPS = 4
"""... and at most once in so many steps: on an accelerator the host waits for what was counted."""
KEPT = 0.7
"""Share of what was counted before that counts on in the next comparison."""


def cache_slot_bytes(store: GroupStore) -> int:
    """Return the bytes of a cache slot with its state and what finds it."""
    return store.row_bytes + CACHE_SLOT_BYTES


class CacheSlotDivision(StepMoments):
    """Divides the bytes of all cache slots of a rank anew where that misses less. Not thread-safe; not collective.

    The values and states of rows do not depend on it: training goes on exactly. A change takes the time to copy the
    cache slots of the dim-groups that change, and to write back the changed rows of those that shrink. The cache slots
    of the one that is copied are in memory twice meanwhile.

    Args:
        tiers: of the dim-groups in tiered storage.
        sizes: bytes of a cache slot of each.

    Attributes:
        changes: divisions that were changed.
    """

    def __init__(self, tiers: Sequence[TieredRows], sizes: Sequence[int]) -> None:
        self._tiers, self._sizes = tiers, sizes
        self._budget = sum(tier.cache_slots * size for tier, size in zip(tiers, sizes, strict=True))
        self._used = self._used_bytes()
        self._steps = self.changes = 0

    @classmethod
    def of(cls, stores: Sequence[GroupStore]) -> CacheSlotDivision | None:
        """Return None where there is nothing to divide: fewer than two dim-groups are in tiered storage."""
        slow = [(store.tier, cache_slot_bytes(store)) for store in stores if store.tier is not None]
        return cls([tier for tier, _ in slow], [size for _, size in slow]) if len(slow) > 1 else None

    def updated(self, optimizer: RowUpdate, step: int) -> None:
        """Divide anew when it is time and pays.

        Raises:
            SlowMemoryError: as ``TieredRows.resize``.
        """
        del optimizer, step
        self.divide()

    def divide(self) -> bool:
        """Count a step, and divide anew when it is time and pays; return whether cache slots changed.

        Raises:
            SlowMemoryError: as ``TieredRows.resize``.
        """
        self._steps += 1
        used = self._used_bytes()
        if self._steps < LEAST_STEPS or used - self._used < EVERY * self._budget:
            return False
        steps, self._steps, self._used = self._steps, 0, used
        curves = [tier.miss_curve(steps, KEPT, size) for tier, size in zip(self._tiers, self._sizes, strict=True)]
        cache_slots = divide_cache_slots(curves, self._budget)
        now = total_misses(curves, [tier.cache_slots for tier in self._tiers])
        if now - total_misses(curves, cache_slots) < LEAST_GAIN * now or not now:
            return False
        return self.change(cache_slots)

    @torch.no_grad()
    def change(self, cache_slots: Sequence[int]) -> bool:
        """Give each dim-group so many cache slots; return False where there is no memory to copy them.

        Raises:
            SlowMemoryError: as ``TieredRows.resize``.
        """
        # Those that shrink first: their bytes make room.
        order = sorted(
            range(len(cache_slots)), key=lambda at: (cache_slots[at] - self._tiers[at].cache_slots) * self._sizes[at]
        )
        for at in order:
            try:
                self._tiers[at].resize(cache_slots[at])
            except torch.OutOfMemoryError:
                logger.warning("no memory to copy %d cache slots: their division stays for now", cache_slots[at])
                return False
        self.changes += 1
        logger.info("cache slots by dim-group: %s", [tier.cache_slots for tier in self._tiers])
        return True

    def _used_bytes(self) -> int:
        return sum(tier.used_rows * size for tier, size in zip(self._tiers, self._sizes, strict=True))
