"""Explanation of a row and its table: estimates, costs, thresholds and the reason for the planned tier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from flexd.core.layout import Tier

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]


class TierReason(StrEnum):
    """Reason for the planned tier of a row."""

    SAVES = "saves"
    """Its copies save more than their slots are worth."""
    PINNED = "pinned"
    """The user pinned the row to its tier."""
    EXCLUDED = "excluded"
    """The user excluded its table."""
    NO_GAIN = "no_gain"
    """Copies cost more than they save, at any number of slots."""
    SLOT_PRICE = "slot_price"
    """Copies would save time, but other rows save more with the same slots."""
    MIGRATION = "migration"
    """By the lower bound of its accesses, copies save less than the migration costs."""
    LATENCY = "latency"
    """All rows that would gain save less together than the latency of synchronisation."""


@dataclass(frozen=True)
class RowExplanation:
    """Explanation of one row. Accesses are expected look-ups; seconds are exposed communication per step.

    Attributes:
        listed: whether the profile lists the row; if not, the mean of the unlisted rows stands in.
        place: 1 for the table's most frequent listed row; 0 if not listed.
        accesses_per_step, accesses_lower, accesses_upper: of the whole job.
        per_rank, per_node, anywhere: u, v and w of docs/cost-model.md.
        seconds: float64[3], by tier.
        live, planned: tiers now and if a plan were made now.
        home_rank: of the authoritative copy.
        moved_to: the node in which it lives instead; None if it has not moved.
        source_node_share: float32[nodes], or None if not known.
    """

    row: int
    key: int
    listed: bool
    place: int
    accesses_per_step: float
    accesses_lower: float
    accesses_upper: float
    per_rank: float
    per_node: float
    anywhere: float
    seconds: Float64Array
    live: Tier
    planned: Tier
    reason: TierReason
    home_rank: int
    moved_to: int | None
    source_node_share: npt.NDArray[np.float32] | None


@dataclass(frozen=True)
class TierThreshold:
    """Accesses from which a row of the table belongs in a tier, in look-ups of the whole job per step.

    Attributes:
        slots: replica slots that one row takes over all ranks.
        slot_seconds: price of one slot, exposed seconds per step; 0 while there are free ones.
        promote_accesses, demote_accesses: a row below the tier is promoted from the first on; a row of the tier is
            demoted below the second; None if no frequency pays.
    """

    tier: Tier
    slots: int
    slot_seconds: float
    promote_accesses: float | None
    demote_accesses: float | None


@dataclass(frozen=True)
class TableExplanation:
    """Explanation of a table and of the requested rows.

    Attributes:
        live_rows, planned_rows: int64[3], by tier.
        slots_used, slots: of the fullest rank in the table's dim-group, in the plan.
        sync_latency_seconds: fixed exposed cost of synchronising the planned tiers (all dim-groups share it).
    """

    table: str
    rows: int
    accesses_per_step: float
    distinct_rows: float
    coverage: float
    live_rows: Int64Array
    planned_rows: Int64Array
    slots_used: int
    slots: int
    sync_latency_seconds: float
    thresholds: tuple[TierThreshold, ...]
    explained: tuple[RowExplanation, ...]
