"""Divide the frames of a rank between its dim-groups by their misses, while it trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from flexd.core.fast_memory import FRAME_BYTES, divide_frames, total_misses
from flexd.embedding.store.slow.tier import Tier
from flexd.embedding.store.store import GroupStore

logger = logging.getLogger(__name__)

LEAST_GAIN = 0.03
"""Share of the expected misses that a new division must save: each change copies all frames of a dim-group."""
EVERY = 0.5
"""Divisions are compared each time that look-ups have used rows of so many times the bytes of all frames..."""
LEAST_STEPS = 4
"""... and at most once in so many steps: on an accelerator the host waits for what was counted."""
KEPT = 0.7
"""Share of what was counted before that counts on in the next comparison."""


def frame_bytes(store: GroupStore) -> int:
    """Return the bytes of a frame with its state and what finds it."""
    return store.row_bytes + FRAME_BYTES


class FrameDivision:
    """Divides the bytes of all frames of a rank anew where that misses less. Not thread-safe; not collective.

    The values and states of rows do not depend on it: training goes on exactly. A change takes the time to copy the
    frames of the dim-groups that change, and to write back the changed rows of those that shrink. The frames of the one
    that is copied are in memory twice meanwhile.

    Args:
        tiers: of the dim-groups in two memories.
        sizes: bytes of a frame of each.

    Attributes:
        changes: divisions that were changed.
    """

    def __init__(self, tiers: Sequence[Tier], sizes: Sequence[int]) -> None:
        self._tiers, self._sizes = tiers, sizes
        self._budget = sum(tier.frames * size for tier, size in zip(tiers, sizes, strict=True))
        self._used = self._used_bytes()
        self._steps = self.changes = 0

    @classmethod
    def of(cls, stores: Sequence[GroupStore]) -> FrameDivision | None:
        """Return None where there is nothing to divide: fewer than two dim-groups are in two memories."""
        slow = [(store.tier, frame_bytes(store)) for store in stores if store.tier is not None]
        return cls([tier for tier, _ in slow], [size for _, size in slow]) if len(slow) > 1 else None

    def after_step(self) -> bool:
        """Count a step, and divide anew when it is time and pays; return whether frames changed. Call it between two
        steps.

        Raises:
            SlowMemoryError: as ``Tier.resize``.
        """
        self._steps += 1
        used = self._used_bytes()
        if self._steps < LEAST_STEPS or used - self._used < EVERY * self._budget:
            return False
        steps, self._steps, self._used = self._steps, 0, used
        curves = [tier.miss_curve(steps, KEPT, size) for tier, size in zip(self._tiers, self._sizes, strict=True)]
        frames = divide_frames(curves, self._budget)
        now = total_misses(curves, [tier.frames for tier in self._tiers])
        if now - total_misses(curves, frames) < LEAST_GAIN * now or not now:
            return False
        return self.change(frames)

    @torch.no_grad()
    def change(self, frames: Sequence[int]) -> bool:
        """Give each dim-group so many frames; return False where there is no memory to copy them.

        Raises:
            SlowMemoryError: as ``Tier.resize``.
        """
        # Those that shrink first: their bytes make room.
        order = sorted(range(len(frames)), key=lambda at: (frames[at] - self._tiers[at].frames) * self._sizes[at])
        for at in order:
            try:
                self._tiers[at].resize(frames[at])
            except torch.OutOfMemoryError:
                logger.warning("no memory to copy %d frames: their division stays for now", frames[at])
                return False
        self.changes += 1
        logger.info("frames by dim-group: %s", [tier.frames for tier in self._tiers])
        return True

    def _used_bytes(self) -> int:
        return sum(tier.used_rows * size for tier, size in zip(self._tiers, self._sizes, strict=True))
