"""Why a row is in its tier, as the admin API tells it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model, RowsByTier, TierName
from flexd.api.planning import GateReport

MAX_EXPLAINED_ROWS = 1000
WhyName = Literal["saves", "pinned", "excluded", "no_gain", "slot_price", "migration", "latency"]


class RowReport(Model):
    """One row. Accesses are expected look-ups of the whole job in one step."""

    row: int
    """Id in its table."""
    key: int = 0
    """In the job's key space: home rank and node owner follow from it."""
    listed: bool = True
    """Whether the profile lists the row by itself; if not, the mean of the table's unlisted rows stands in."""
    place: int = 0
    """1 for the most frequent row of the table; 0 if not listed."""
    accesses_per_step: FiniteOrNone = None
    """Estimate."""
    accesses_lower: FiniteOrNone = None
    """Lower bound: what a promotion must pay with."""
    accesses_upper: FiniteOrNone = None
    """Upper bound: what a demotion must not pay with."""
    per_rank: FiniteOrNone = None
    """Probability (or number of micro-batches) that one rank looks it up in a step: u."""
    per_node: FiniteOrNone = None
    """The same for any rank of one node: v."""
    anywhere: FiniteOrNone = None
    """The same for any rank: w."""
    seconds: dict[TierName, FiniteOrNone] = Field(default_factory=dict)
    """Exposed communication that the row costs a step in each tier."""
    live: TierName = "HOME"
    """Tier now."""
    planned: TierName = "HOME"
    """Tier if a plan were made now."""
    why: WhyName = "saves"
    """Why the planned tier."""
    home_rank: int = 0
    """Rank of the authoritative copy."""
    source_node_share: tuple[float, ...] | None = None
    """By which node its accesses come from; null if not known."""


class ThresholdReport(Model):
    """When a row of the table belongs in a tier, in look-ups of the whole job per step."""

    tier: TierName
    """The tier."""
    slots: int = 0
    """Replica slots that one row takes over all ranks."""
    slot_seconds: FiniteOrNone = None
    """Price of a slot: exposed seconds a step that the least useful replica earns with it; 0 while slots are free."""
    promote_accesses: FiniteOrNone = None
    """From here on a row below the tier is promoted; null if no frequency pays."""
    demote_accesses: FiniteOrNone = None
    """Below this a row of the tier is demoted."""


class Explanation(Model):
    """A table, its thresholds, and some of its rows."""

    table: str
    """Name."""
    rows: int = 0
    """Rows of the table."""
    accesses_per_step: FiniteOrNone = None
    """Look-ups of the whole job in one step."""
    distinct_rows: FiniteOrNone = None
    """Rows seen at all."""
    coverage: FiniteOrNone = None
    """Share of the accesses that the profile explains."""
    live_rows: RowsByTier = Field(default_factory=dict)
    """Rows by tier now."""
    planned_rows: RowsByTier = Field(default_factory=dict)
    """Rows by tier if a plan were made now."""
    slots_used: int = 0
    """Replica slots in use on the fullest rank, in the plan, of the table's dim-group."""
    slots: int = 0
    """Replica slots of a rank for that dim-group."""
    sync_latency_seconds: FiniteOrNone = None
    """Fixed cost of synchronising replicas at all, a step."""
    thresholds: tuple[ThresholdReport, ...] = ()
    """By tier above HOME that this job can use."""
    explained: tuple[RowReport, ...] = ()
    """The row that was asked for, or the hottest ones."""
    gates: tuple[GateReport, ...] = ()
    """Is enough known to carry out a plan that is made now?"""
