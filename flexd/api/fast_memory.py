"""How a plan divides the fast memory of ranks whose home rows are in two memories."""

from __future__ import annotations

from flexd.api.base import FiniteOrNone, Model


class FastMemoryGroup(Model):
    """Home rows of one dim-group on a rank."""

    home_rows: int = 0
    """Most of any rank."""
    frames: int = 0
    """Of them in fast memory now."""
    planned_frames: int = 0
    """In fast memory with the planned division of the same bytes."""
    misses: FiniteOrNone = None
    """Predicted reads from slow memory a step with the present frames."""
    measured_misses: FiniteOrNone = None
    """Measured, recent; null if it is not known."""
    planned_misses: FiniteOrNone = None
    """Predicted with the planned frames."""
    slots: int = 0
    """Replica slots now."""
    joint_frames: int | None = None
    """Frames if frames and replica slots shared their bytes; null without a price of a miss."""
    joint_slots: int | None = None
    """Replica slots then; they are allocated when training starts."""


class FastMemoryReport(Model):
    """Fast memory of a rank between the frames of dim-groups and replica slots."""

    budget_bytes: int = 0
    """What frames take now."""
    miss_seconds: FiniteOrNone = None
    """Measured wait for slow memory a miss; null before there was one."""
    stall_seconds: FiniteOrNone = None
    """Predicted wait of a step with the present frames."""
    planned_stall_seconds: FiniteOrNone = None
    """Predicted wait with the planned frames."""
    seconds_per_byte: FiniteOrNone = None
    """What one more byte would save a step."""
    groups: tuple[FastMemoryGroup, ...] = ()
    """By dim-group, in the order of their first tables."""
