"""How much fast memory a given slowdown saves: misses and stall of a step over the share of the rows that is fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexd.core.fast_memory import divide_frames, total_misses
from flexd.planner.memory.miss_curve import MissCurve

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class MemoryPoint:
    """One size of fast memory on a rank.

    Attributes:
        share: of the bytes that frames for all rows take.
        fast_bytes, saved_bytes: fast memory of frames, and what it is less than rows that are all fast.
        missed_rows, missed_share: expected reads from slow memory in a step, and of the distinct rows that it uses.
        stall_seconds: of these in a step, nothing of it hidden.
    """

    share: float
    fast_bytes: int
    saved_bytes: int
    missed_rows: float
    missed_share: float
    stall_seconds: float


def memory_points(
    curves: Sequence[MissCurve], miss_seconds: float, shares: Sequence[float] = SHARES
) -> tuple[MemoryPoint, ...]:
    """Return a point a share, each with its own best division over the dim-groups.

    Args:
        miss_seconds: price of a row read from slow memory.
    """
    whole = sum(curve.home_rows * curve.frame_bytes for curve in curves)
    used = sum(curve.used_rows for curve in curves)
    by_frames = [curve.frame_curve() for curve in curves]
    points = []
    for share in shares:
        frames = divide_frames(by_frames, share * whole)
        taken = sum(count * curve.frame_bytes for count, curve in zip(frames, curves, strict=True))
        missed = total_misses(by_frames, frames)
        points.append(
            MemoryPoint(
                share, taken, whole - taken, missed, missed / used if used else 0.0, missed * miss_seconds
            )
        )  # fmt: skip
    return tuple(points)
