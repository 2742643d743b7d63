"""Traffic of the last half hour and the plans that moved rows, as the admin API tells them."""

from __future__ import annotations

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model, RowsByTier


class TrafficSample(Model):
    """What the ranks reported in one interval."""

    unix_seconds: float
    """Begin of the interval."""
    steps: int = 0
    """Steps of all ranks."""
    accesses: RowsByTier = Field(default_factory=dict)
    """Look-ups by the tier of the row that answered, a rank and step."""
    inter_node_bytes: FiniteOrNone = None
    """Sent to other nodes for rows and their synchronisation, a rank and step; null without steps."""
    intra_node_bytes: FiniteOrNone = None
    """The same inside the nodes."""
    migration_bytes: FiniteOrNone = None
    """Sent to migrate rows, over both links, a rank and step."""
    row_wise_inter_node_bytes: FiniteOrNone = None
    """What every rank asking every home for every look-up would send between nodes; null until ranks are known."""
    step_seconds: FiniteOrNone = None
    """Wall time of a step, the mean of all ranks."""


class PlanMark(Model):
    """A plan that moved rows."""

    plan_id: str
    """Id of the plan."""
    reason: str = ""
    """What asked for it."""
    created_unix_seconds: float = 0.0
    """When it was made."""
    state: str = ""
    """How its migration ended."""
    promotions: int = 0
    """Rows that got more copies."""
    demotions: int = 0
    """Rows that got fewer."""
    rows_applied: int = 0
    """Rows whose tier every rank has changed."""


class Timeline(Model):
    """The newest samples and plans, oldest first."""

    interval_seconds: float
    """Of each sample."""
    samples: tuple[TrafficSample, ...] = ()
    """Of the last half hour; intervals without a report are left out."""
    plans: tuple[PlanMark, ...] = ()
    """The newest plans that moved rows."""
