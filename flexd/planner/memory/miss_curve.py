"""Expected misses of a rank's home rows as a function of their frames.

Frames that hold the most frequent rows miss the touches of the others: with touches w_1 >= w_2 >= ... of a rank's home
rows in a pass, F frames miss ``K * sum(w_i, i > F)`` rows in a step of K passes. Of all policies that do not know the
future none misses less if touches are independent (Aho, Denning, Ullman: Principles of optimal page replacement, JACM
18(1), 1971, algorithm A0); RecShard (arXiv 2201.10095) splits tables by the same curve. Where there are fewer frames
than distinct rows of a pass, those beyond them have gone when their update comes and are read again:
``K * max(0, D - F)`` with ``D = sum(w_i)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.core.fast_memory import FRAME_BYTES, FrameCurve, divide_frames, total_misses
from flexd.core.layout import RankLayout
from flexd.planner.model.touches import independent
from flexd.planner.model.workload import GroupLoad

Float64Array = npt.NDArray[np.float64]

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_ANYWHERE = 2
"""Place of w among touches."""


@dataclass(frozen=True)
class MissCurve:
    """Home rows of one dim-group on one rank: the mean over the ranks, which hold equal parts of every class.

    Attributes:
        touches: float64[c], in one pass, of a row of each class, descending and above 0.
        rows: float64[c], rows of each class that have their home on the rank.
        home_rows: most home rows of any rank, touched or not.
        frame_bytes: of one frame.
        passes: forward passes of a step.
    """

    touches: Float64Array
    rows: Float64Array
    home_rows: int
    frame_bytes: int
    passes: int = 1

    @classmethod
    def of(cls, load: GroupLoad, layout: RankLayout, group_rows: int) -> MissCurve:
        """Make the curve of a dim-group of ``group_rows`` rows.

        A row is used at its home when any rank looks it up. Copies do not change that for rows that are trained: their
        update reaches the home as well.
        """
        passes = load.micro_batches
        listed, bins = load.touches, load.bin_touches
        if listed is None:
            listed = independent(load.accesses / passes, layout)
        if bins is None:
            bins = independent(load.bin_accesses / passes, layout)
        touches = np.concatenate([listed[_ANYWHERE], bins[_ANYWHERE]])
        rows = np.concatenate([np.ones(len(load.keys)), load.bin_rows]) / layout.world_size
        used = np.flatnonzero((touches > 0) & (rows > 0))
        order = used[np.argsort(-touches[used], kind="stable")]
        touches, rows = touches[order], rows[order]
        # Sketches estimate the rows of bins: together they may be more than the table has.
        home_rows = -(-group_rows // layout.world_size)
        rows = np.diff(np.minimum(np.cumsum(rows), home_rows), prepend=0.0)
        some = rows > 0
        return cls(
            touches[some], rows[some], home_rows, load.row_bytes + load.state_bytes + FRAME_BYTES, passes
        )  # fmt: skip

    @property
    def distinct_rows(self) -> float:
        """Expected distinct home rows that a pass uses on the rank."""
        return float(self.touches @ self.rows)

    @property
    def used_rows(self) -> float:
        """Expected distinct home rows that a step uses, each pass counted."""
        return self.passes * self.distinct_rows

    def frame_curve(self) -> FrameCurve:
        """Return the misses of a step by frames; rows that nothing touches come last and save nothing."""
        ends = np.cumsum(self.rows)
        bounds = np.union1d(np.append(ends, self.home_rows), self.distinct_rows)
        bounds = bounds[(bounds > 0) & (bounds <= self.home_rows)]
        frames = np.diff(bounds, prepend=0.0)
        middle = bounds - frames / 2
        of_class = np.searchsorted(ends, middle)
        saved = np.append(self.touches, 0.0)[of_class] + (middle < self.distinct_rows)
        return FrameCurve(frames, self.passes * saved, self.home_rows, self.frame_bytes)


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
