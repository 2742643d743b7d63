"""A plan: its changes, its cost, the reasons, what homes and dealing by affinity would win; and the reasons for a row's
tier, and for the memory that it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from flexd.api.base import TIERS, RequestBody, RowsByTier, TierName
from flexd.api.planning import TriggerName, rows_above_home
from flexd.api.stream import PageRequest
from flexd.control.daemon.migration import GateReport
from flexd.core import units
from flexd.core.model import DETAIL, HIDDEN, FiniteOrNone, Model, Show, gauge

if TYPE_CHECKING:
    from flexd.core.node_map import NodeMap
    from flexd.core.placement import Placement
    from flexd.operations.affinity import LearntHomes
    from flexd.operations.planning import Proposal
    from flexd.planner.affinity.outlook import AffinityOutlook
    from flexd.planner.explain import RowExplanation, TableExplanation
    from flexd.planner.plan import Plan


MAX_PAGE_USERS = 100_000


class ShareRangeReport(Model):
    """A predicted share, and the 5th to the 95th percentile over batches."""

    expected: FiniteOrNone = None
    """Of all judged batches together."""
    low: FiniteOrNone = None
    high: FiniteOrNone = None


class AffinityReport(Model):
    """Bytes between nodes with rows in the node that uses them most, as far as they may move, and samples dealt."""

    messages: tuple[str, ...] = ()
    loader: ShareRangeReport | None = None
    """Share of the chain's bytes left with a loader that deals; null if not known."""
    dealing_loader: ShareRangeReport | None = None
    """Share left with a loader that deals and rows where their rule puts them; null if not known."""
    by_user: ShareRangeReport | None = None
    """Share left with each user's samples in her node; null without ids of users."""

    def expected(self) -> dict[str, float | None]:
        """Return the shares by name; None for those that are not known."""
        shares = {"loader": self.loader, "dealing_loader": self.dealing_loader, "by_user": self.by_user}
        return {name: None if share is None else share.expected for name, share in shares.items()}


class UsersRequest(PageRequest):
    """A page of users."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_USERS)] = MAX_PAGE_USERS


class UserNodePage(Model):
    """Users, ascending by id, and the node in which the samples of each are best trained."""

    learnt: int = 0
    """Number of the learning that found them: pages of equal numbers belong together."""
    nodes: int = 0
    users: int = 0
    """Users of all pages."""
    ids: tuple[int, ...] = ()
    """Of this page."""
    nodes_of: tuple[int, ...] = ()
    by_user: ShareRangeReport | None = None
    """Share of the chain's bytes left with all samples of a user in her node; null if it is not known."""


SHARES = ("loader", "dealing_loader", "by_user")


def affinity_report(outlook: AffinityOutlook) -> AffinityReport:
    """Return the report of an outlook."""
    found = {name: getattr(outlook.forecast, name) for name in SHARES}
    shares = {name: None if each is None else ShareRangeReport.from_object(each) for name, each in found.items()}
    return AffinityReport(messages=outlook.messages, **shares)


def user_node_page(found: LearntHomes, users: NodeMap, offset: int, limit: int) -> UserNodePage:
    """Return at most ``limit`` users from ``offset`` on."""
    share, page = found.plan.forecast.by_user, slice(offset, offset + limit)
    return UserNodePage(
        learnt=found.number, nodes=users.nodes, users=len(users.ids), ids=tuple(users.ids[page].tolist()),
        nodes_of=tuple(users.nodes_of[page].tolist()),
        by_user=None if share is None else ShareRangeReport.from_object(share),
    )  # fmt: skip


LinkName = Literal["intra_node", "inter_node"]


class LinkBytes(Model):
    """Sent by one rank in one step on one class of link."""

    all_to_all: FiniteOrNone = None
    """Bytes of ids and rows in the exchange, forward and backward."""
    sync: FiniteOrNone = None


class PhaseCost(Model):
    """One phase of a step on one class of link: bytes that a rank sends, and predicted time, hidden or not."""

    bytes: FiniteOrNone = None
    seconds: FiniteOrNone = None


class CostReport(Model):
    """Predicted communication of one rank in one step."""

    exposed_seconds: FiniteOrNone = None
    """Communication that compute does not hide, in the mean over the ranks. Plans are compared by it."""
    total_seconds: FiniteOrNone = None
    """Time of all communication, hidden or not."""
    forward_seconds: FiniteOrNone = None
    backward_seconds: FiniteOrNone = None
    sync_seconds: FiniteOrNone = None
    ids_sent: FiniteOrNone = None
    """Row ids that one rank requests."""
    bytes: Annotated[dict[LinkName, LinkBytes], DETAIL] = Field(default_factory=dict)
    phases: Annotated[dict[str, dict[LinkName, PhaseCost]], HIDDEN] = Field(default_factory=dict)
    """Cost by phase (``forward_ids``, ``forward_rows``, ``backward_rows``, ``sync_mask``, ``sync_rows``) and link."""


class ReplicationReport(Model):
    """The gain of replicas over the same exchange with every row at home, per rank and step."""

    messages: tuple[str, ...] = ()


class ExchangeReport(Model):
    """The exchange of rows, and the one that would be cheapest for this job."""

    planned: str = "chain"
    """The exchange that the job runs, which prices the plan."""
    recommended: str = "chain"
    """The cheapest by the model; the next start of the job may use it."""
    recommended_exposed_seconds: FiniteOrNone = None


class CopiesMemory(Model):
    """Memory of a rank for copies: used, and the worth of more."""

    used_bytes: int = 0
    """Copies of the plan, on the rank that holds most."""
    memory_bytes: int | None = None
    """Memory of every rank for copies (``copies_memory_bytes``); null if the trainer gives a number of slots alone."""
    twice_saves_seconds: FiniteOrNone = None
    """Exposed seconds that a step would take less with as much memory again, by a plan for it."""

    def __str__(self) -> str:
        if self.memory_bytes is None:
            return f"{units.size(self.used_bytes)} per rank"
        more = units.size(self.memory_bytes)
        used = f"{units.size(self.used_bytes)} of {more} per rank"
        saved = units.seconds(self.twice_saves_seconds) if self.twice_saves_seconds else "nothing"
        return f"{used}; {more} more would save {saved} per step"


class PlanReport(Model):
    """A plan against the live placement: its changes, its cost, and the reasons."""

    plan_id: str
    parent_id: Annotated[str, DETAIL] = ""
    """The plan that the live placement came from."""
    reason: str = ""
    trigger: Annotated[TriggerName | None, DETAIL] = None
    """Kind of its trigger; null where only the plan is known."""
    requested_by: Annotated[str, DETAIL] = ""
    """The person or program that requested it; ``flexd`` for the daemon itself."""
    gates: tuple[GateReport, ...] = ()
    """Gates of its profile; empty where only the plan is known."""
    created_unix_seconds: Annotated[FiniteOrNone, DETAIL] = None
    topology_generation: Annotated[int, HIDDEN] = 0
    profile_generation: Annotated[int, HIDDEN] = 0
    cluster: Annotated[str, DETAIL] = ""
    replica_slots: Annotated[tuple[int, ...], DETAIL] = ()
    """Replica slots of a rank by dim-group, of the memory for copies the part that each gets."""
    copies: Annotated[CopiesMemory | None, Show("copies", str)] = None
    rows_before: RowsByTier = Field(default_factory=dict)
    """Rows above HOME in the live placement."""
    rows: RowsByTier = Field(default_factory=dict)
    """Rows above HOME in the plan."""
    promotions: int = 0
    """Rows that get more copies."""
    demotions: int = 0
    """Rows that lose copies."""
    migration_bytes: int = 0
    """Row values and optimizer state that the migration copies."""
    migration_seconds: Annotated[FiniteOrNone, DETAIL] = None
    """Predicted time of the migration, by bandwidth alone."""
    objective_seconds: Annotated[FiniteOrNone, DETAIL] = None
    """The planner's objective: exposed time, with row bounds and the migration over the horizon."""
    lower_bound_seconds: Annotated[FiniteOrNone, DETAIL] = None
    """No plan within the replica slots has a smaller objective."""
    gap: FiniteOrNone = None
    """Largest share that the plan may miss of what any plan could save in the mean over the ranks: 0 is proven best, 1
    an empty plan where one could save."""
    saved_seconds: FiniteOrNone = None
    """Predicted saving of a step against the live placement, exposed seconds in the mean over the ranks."""
    rehomed_rows: int = 0
    """Rows that live in another node than that of their home rank."""
    moves_save_seconds: Annotated[FiniteOrNone, DETAIL] = None
    """The part of the saving that comes from rows which move to other nodes or back."""
    saved_share: FiniteOrNone = None
    """The saving as a share of the measured step; null if that is not known."""
    step_seconds: Annotated[FiniteOrNone, DETAIL] = None
    before: CostReport = CostReport()
    """The live placement under the profile as it is now."""
    after: CostReport = CostReport()
    """The plan under the same profile."""
    exchange: ExchangeReport = ExchangeReport()
    affinity: AffinityReport | None = None
    """The forecast of homes and dealing by affinity; null if rows that occur together are not sampled."""
    baselines: dict[str, CostReport] = Field(default_factory=dict)
    """Other strategies under the same profile, by name."""
    replication: ReplicationReport = ReplicationReport()

    FAMILIES = (
        gauge(
            "flexd_plan_predicted_step_communication_seconds",
            "Communication of one step as the newest plan prices it, before and after.",
            lambda plan: {"before": plan.before.exposed_seconds, "after": plan.after.exposed_seconds},
            ("placement",),
        ),
        gauge(
            "flexd_plan_predicted_step_saving_ratio",
            "Of a step's measured wall time, by the newest plan, 0-1; NaN if either is not known.",
            "saved_share",
        ),
        gauge(
            "flexd_affinity_bytes_ratio",
            "Bytes between nodes that homes and dealing by affinity would leave, over the chain's; NaN if unknown.",
            lambda plan: (plan.affinity or AffinityReport()).expected(),
            ("dealing",),
        ),
    )


def plan_report(plan: Plan, live: Placement, affinity: AffinityOutlook | None = None) -> PlanReport:
    """Return a plan against the placement that it starts from."""
    found = None if affinity is None else affinity_report(affinity)
    return PlanReport.model_validate({**plan.summary, "rows_before": rows_above_home(live), "affinity": found})


def proposal_report(proposal: Proposal) -> PlanReport:
    """Return a kept plan with its trigger and the gates of its profile."""
    trigger, gates = proposal.trigger, proposal.gates
    return plan_report(proposal.plan, proposal.live, proposal.affinity).model_copy(
        update={"trigger": trigger.kind.value, "requested_by": trigger.requested_by, "gates": gates}
    )


ReasonName = Literal["saves", "pinned", "excluded", "no_gain", "slot_price", "migration", "latency"]


class ExplainRequest(RequestBody):
    """Body of ``POST /v1/explain``."""

    table: Annotated[str, Field(max_length=256)]
    row: Annotated[int | None, Field(ge=0)] = None
    """One row; if null, the hottest rows."""
    hottest: Annotated[int, Field(ge=0, le=1000)] = 10
    """Number of the hottest rows, if no row is given."""


class AccessRange(Model):
    """An estimate and its bounds."""

    estimate: FiniteOrNone = None
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


class RowReport(Model):
    """One row."""

    row: int
    key: int = 0
    """Its key in the job's key space, which gives home rank and node owner."""
    listed: bool = True
    """True if the profile lists the row; if not, the mean of the table's unlisted rows is used."""
    place: int = 0
    """1 for the most frequent row of the table; 0 if not listed."""
    accesses: Annotated[AccessRange, Show("accesses per step", lambda found: f"{found.estimate:.4g}")] = AccessRange()
    """Expected look-ups of the whole job in one step."""
    touches: Annotated[RowTouchReport, DETAIL] = RowTouchReport()
    seconds: dict[TierName, FiniteOrNone] = Field(default_factory=dict)
    """Exposed communication that the row costs a step in each tier."""
    live: TierName = "HOME"
    planned: TierName = "HOME"
    """Tier if a plan were made now."""
    reason: ReasonName = "saves"
    home: Annotated[RowHome, DETAIL] = RowHome()
    source_node_share: tuple[float, ...] | None = None
    """Shares of its accesses by the node they come from; null if not known."""


class ThresholdReport(Model):
    """The frequencies at which a row of the table belongs in a tier, in look-ups of the whole job per step."""

    tier: TierName
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
    rows: int = 0
    accesses_per_step: FiniteOrNone = None
    """Look-ups of the whole job in one step."""
    distinct_rows: FiniteOrNone = None
    coverage: FiniteOrNone = None
    """Share of the accesses that the profile explains."""
    live_rows: RowsByTier = Field(default_factory=dict)
    planned_rows: RowsByTier = Field(default_factory=dict)
    """Rows by tier if a plan were made now."""
    slots: SlotsInUse = SlotsInUse()
    sync_latency_seconds: FiniteOrNone = None
    """Fixed cost per step of synchronising replicas at all."""
    thresholds: tuple[ThresholdReport, ...] = ()
    """By tier above HOME that this job can use."""
    explained: tuple[RowReport, ...] = ()
    """The requested row, or the hottest ones."""
    gates: tuple[GateReport, ...] = ()


def explanation(
    made: TableExplanation,
    gates: Sequence[GateReport],
    home_of: Callable[[int], tuple[int, float] | None] | None = None,
) -> Explanation:
    """Return the planner's explanation.

    Args:
        gates: of the profile that it was made from.
        home_of: returns the node of a key by affinity, and the share of its touches from there, None if not known.
    """
    return Explanation.from_object(
        made,
        slots=SlotsInUse(used=made.slots_used, total=made.slots),
        live_rows=dict(zip(TIERS, made.live_rows.tolist(), strict=True)),
        planned_rows=dict(zip(TIERS, made.planned_rows.tolist(), strict=True)),
        thresholds=tuple(ThresholdReport.from_object(each, tier=each.tier.name) for each in made.thresholds),
        explained=tuple(_row(row, home_of and home_of(row.key)) for row in made.explained),
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
