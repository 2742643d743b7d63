"""The reasons for a row's tier, and for the memory that it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from flexd.api.base import TIERS, RequestBody, RowsByTier, TierName
from flexd.control.daemon.migration import GateReport
from flexd.core.model import DETAIL, FiniteOrNone, Model, Show

if TYPE_CHECKING:
    from flexd.planner.explain import RowExplanation, TableExplanation

MAX_EXPLAINED_ROWS = 1000
ReasonName = Literal["saves", "pinned", "excluded", "no_gain", "slot_price", "migration", "latency"]


class ExplainRequest(RequestBody):
    """Body of ``POST /v1/explain``."""

    table: Annotated[str, Field(max_length=256)]
    row: Annotated[int | None, Field(ge=0)] = None
    """One row; if null, the hottest rows."""
    hottest: Annotated[int, Field(ge=0, le=MAX_EXPLAINED_ROWS)] = 10
    """Number of the hottest rows, if no row is given."""


class AccessRange(Model):
    """An estimate and its bounds."""

    estimate: FiniteOrNone = None
    """Estimate."""
    lower: FiniteOrNone = None
    """Lower bound, which a promotion must pay off with."""
    upper: FiniteOrNone = None
    """Upper bound, with which the copies must not pay off for a demotion."""


class RowTouchReport(Model):
    """Probabilities that a row is looked up in a step."""

    per_rank: FiniteOrNone = None
    """By one rank (or the number of micro-batches): u."""
    per_node: FiniteOrNone = None
    """By any rank of one node: v."""
    anywhere: FiniteOrNone = None
    """By any rank: w."""


class RowHome(Model):
    """Where a row lives."""

    rank: int = 0
    """Rank of the authoritative copy; of a re-homed row, the rank to which it can come back."""
    moved_to: int | None = None
    """The node in which the row lives instead of that of its home rank; null if it has not moved."""
    affinity_node: int | None = None
    """The node in which it would live by affinity, of the newest plan; null if it is not among the sampled rows."""
    affinity_share: FiniteOrNone = None
    """Share of its touches that would come from that node, with samples dealt."""


class SlotsInUse(Model):
    """Replica slots of the table's dim-group on the fullest rank."""

    used: int = 0
    """In use, in the plan."""
    total: int = 0
    """Of a rank."""


class RowReport(Model):
    """One row."""

    row: int
    """Id of the row in its table."""
    key: int = 0
    """Its key in the job's key space, which gives home rank and node owner."""
    listed: bool = True
    """True if the profile lists the row; if not, the mean of the table's unlisted rows is used."""
    place: int = 0
    """1 for the most frequent row of the table; 0 if not listed."""
    accesses: Annotated[AccessRange, Show("accesses per step", lambda found: f"{found.estimate:.4g}")] = AccessRange()
    """Expected look-ups of the whole job in one step."""
    touches: Annotated[RowTouchReport, DETAIL] = RowTouchReport()
    """The probabilities that it is needed in a step."""
    seconds: dict[TierName, FiniteOrNone] = Field(default_factory=dict)
    """Exposed communication that the row costs a step in each tier."""
    live: TierName = "HOME"
    """Tier now."""
    planned: TierName = "HOME"
    """Tier if a plan were made now."""
    reason: ReasonName = "saves"
    """Reason for the planned tier."""
    home: Annotated[RowHome, DETAIL] = RowHome()
    """The place of its authoritative copy."""
    source_node_share: tuple[float, ...] | None = None
    """Shares of its accesses by the node they come from; null if not known."""


class ThresholdReport(Model):
    """The frequencies at which a row of the table belongs in a tier, in look-ups of the whole job per step."""

    tier: TierName
    """The tier."""
    slots: int = 0
    """Replica slots that one row takes over all ranks."""
    slot_seconds: FiniteOrNone = None
    """Price of a slot: exposed seconds per step that the least useful replica earns with it; 0 while slots are free."""
    promote_accesses: FiniteOrNone = None
    """From here on a row below the tier is promoted; null if no frequency pays."""
    demote_accesses: FiniteOrNone = None
    """Below this a row of the tier is demoted."""


class Explanation(Model):
    """A table, its thresholds, and some of its rows."""

    table: str
    """Name of the table."""
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
    slots: SlotsInUse = SlotsInUse()
    """Replica slots of the table's dim-group."""
    sync_latency_seconds: FiniteOrNone = None
    """Fixed cost per step of synchronising replicas at all."""
    thresholds: tuple[ThresholdReport, ...] = ()
    """By tier above HOME that this job can use."""
    explained: tuple[RowReport, ...] = ()
    """The requested row, or the hottest ones."""
    gates: tuple[GateReport, ...] = ()
    """Gates of a plan that is made now."""


def explanation(
    made: TableExplanation,
    gates: Sequence[GateReport],
    home_of: Callable[[int], tuple[int, float] | None] = lambda key: None,
) -> Explanation:
    """Return the planner's explanation.

    Args:
        gates: of the profile that it was made from.
        home_of: returns the node of a key by affinity, and the share of its touches from there; None if not known.
    """
    return Explanation.from_object(
        made,
        slots=SlotsInUse(used=made.slots_used, total=made.slots),
        live_rows=dict(zip(TIERS, made.live_rows.tolist(), strict=True)),
        planned_rows=dict(zip(TIERS, made.planned_rows.tolist(), strict=True)),
        thresholds=tuple(ThresholdReport.from_object(each, tier=each.tier.name) for each in made.thresholds),
        explained=tuple(_row(row, home_of(row.key)) for row in made.explained),
        gates=tuple(gates),
    )


def _row(row: RowExplanation, affinity: tuple[int, float] | None) -> RowReport:
    estimate, lower, upper = row.accesses
    per_rank, per_node, anywhere = row.touches
    node, share = affinity or (None, None)
    return RowReport.from_object(
        row,
        listed=row.place > 0,
        accesses=AccessRange(estimate=estimate, lower=lower, upper=upper),
        touches=RowTouchReport(per_rank=per_rank, per_node=per_node, anywhere=anywhere),
        seconds=dict(zip(TIERS, row.seconds.tolist(), strict=True)),
        live=row.live.name,
        planned=row.planned.name,
        reason=row.reason.value,
        home=RowHome(rank=row.home_rank, moved_to=row.moved_to, affinity_node=node, affinity_share=share),
    )
