"""Which rows of a table the frames of fast memory are expected to hold, at a division of them.

Frames hold the rows that are touched most (``MissCurve``), so a number of frames is a threshold of touches: rows of the
dim-group that are touched more often are in fast memory, whichever table they are of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.planner.memory.miss_curve import MissCurve
from flexd.planner.memory.proposal import FastMemoryProposal

Float64Array = npt.NDArray[np.float64]

_SAME = 1e-9
"""Relative difference of touches that are the same number, computed among others."""


@dataclass(frozen=True)
class HeldRows:
    """Rows of one table in the frames of its dim-group, on one rank.

    Attributes:
        frames: of the dim-group, which its tables share.
        held_rows: expected rows of the table in them: its share of the frames.
        misses: expected rows of the table that a step reads from slow memory.
        least_touches: probability of a use in a pass from which on a row is held; 0 where all rows fit that are used.
        partly_held: share of the rows of just these touches that are held.
        next_frame_misses: misses a step that one more frame of the dim-group would save.
        next_frame_seconds: wait of a step that it would save; NaN where the price of a miss is not known.
    """

    frames: int
    held_rows: float
    misses: float
    least_touches: float
    partly_held: float
    next_frame_misses: float
    next_frame_seconds: float

    @classmethod
    def of(cls, frames: int, group: MissCurve, table: MissCurve, miss_seconds: float) -> HeldRows:
        """Return the rows of a table in the frames of a dim-group.

        Args:
            group, table: curves of the dim-group, and of the table's own rows.
        """
        ends = np.cumsum(group.rows)
        at = int(np.searchsorted(ends, frames, side="right"))
        least = float(group.touches[at]) if at < len(ends) and frames < group.home_rows else 0.0
        same = _same(group.touches, least)
        before = float(group.rows[~same & (group.touches > least)].sum())
        partly = min(1.0, max(0.0, (frames - before) / float(group.rows[same].sum()))) if same.any() else 0.0
        held = _held(table.touches, least, partly)
        again = max(0.0, group.distinct_rows - frames) if frames < group.home_rows else 0.0
        own_part = table.distinct_rows / group.distinct_rows if group.distinct_rows > 0 else 0.0
        misses = group.passes * (float(table.touches @ (table.rows * (1 - held))) + again * own_part)
        saved = group.misses(frames) - group.misses(frames + 1)
        return cls(
            frames, float(table.rows @ held), misses, least, partly, saved,
            saved * miss_seconds if miss_seconds > 0 else math.nan,
        )  # fmt: skip

    def held(self, touches: Float64Array) -> Float64Array:
        """float64[n] touches of rows in a pass -> float64[n], the probability that each is in a frame."""
        return _held(touches, self.least_touches, self.partly_held)


@dataclass(frozen=True)
class TableFastMemory:
    """Fast memory of a table on a rank: with the frames that ranks have, and with those of the plan.

    Attributes:
        used_rows: expected distinct rows of the table that a step uses, each pass counted.
        frame_bytes: of one frame.
        miss_seconds: measured wait a miss; NaN where it is not known.
        passes: forward passes of a step.
    """

    now: HeldRows
    planned: HeldRows
    used_rows: float
    frame_bytes: int
    miss_seconds: float
    passes: int


def table_fast_memory(
    proposal: FastMemoryProposal, group_number: int, group: MissCurve, table: MissCurve
) -> TableFastMemory:
    """Return the fast memory of one table.

    Args:
        group_number: dim-group of the table.
        group, table: curves of the dim-group, and of the table's own rows.
    """
    now, planned = (
        HeldRows.of(int(division.frames[group_number]), group, table, proposal.miss_seconds)
        for division in (proposal.now, proposal.planned)
    )
    return TableFastMemory(now, planned, table.used_rows, group.frame_bytes, proposal.miss_seconds, group.passes)


def _same(touches: Float64Array, least: float) -> npt.NDArray[np.bool_]:
    same: npt.NDArray[np.bool_] = np.abs(touches - least) <= _SAME * least
    return same & (touches > 0)


def _held(touches: Float64Array, least: float, partly: float) -> Float64Array:
    return np.where(_same(touches, least), partly, (touches > least).astype(np.float64))
