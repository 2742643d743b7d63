"""The training steps as the ranks report them: sums, phases, slow memory, and traffic over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flexd.api.base import RowsByTier
from flexd.api.planning import by_metric_tier
from flexd.control.daemon.migration import MigrationRecord
from flexd.core.model import (
    HIDDEN,
    MAX_LABEL_VALUES,
    FiniteOrNone,
    Model,
    by_table,
    counter,
    gauge,
    summary,
    with_zeros,
)
from flexd.core.stream_ids import IdsOfStream
from flexd.core.usage_warnings import UsageWarningKind

if TYPE_CHECKING:
    from flexd.control.protocol.report import StepReport, UsedExchange
    from flexd.core.keyspace import TableSpec
    from flexd.core.placement import RankLayout
    from flexd.operations.ids_monitor import IdsTotals
    from flexd.operations.training_monitor import (
        PhaseAverages,
        RankAverages,
        SlowMemoryTotals,
        TrafficInterval,
        UsageWarningTotal,
    )
    from flexd.sketch.id_stream import IdsSeen


_OF_TABLES = (("table",), MAX_LABEL_VALUES)
"""Labels of what is counted by table, and how many values they may have."""
OTHERS = "other"
"""Stands for the tables that the ranks did not name, each of few misses."""


class SlowTableStatus(Model):
    """Rows of one table in tiered storage, counted as in ``SlowMemoryStatus``."""

    table: str
    """Its name; ``other`` for tables that the ranks' reports did not name."""
    used: int
    missed: int
    evicted: int
    written: int


class SlowMemoryStatus(Model):
    """Rows in tiered storage, over all ranks since the daemon started."""

    used: int = 0
    """Distinct home rows that look-ups needed, summed over passes."""
    missed: int = 0
    """Of those, rows that were in slow memory."""
    evicted: int = 0
    written: int = 0
    """Of those, rows that had changed and were written to slow memory."""
    bytes_read: int = 0
    bytes_written: int = 0
    wait_seconds: float = 0.0
    wait_share: FiniteOrNone = None
    tables: tuple[SlowTableStatus, ...] = ()
    """Those with rows in slow memory; last those that the ranks' reports did not name."""

    FAMILIES = (
        counter(
            "flexd_slow_memory_rows_used",
            "Distinct home rows that look-ups needed, by table, of ranks with rows in tiered storage.",
            by_table("used"), ("table",), MAX_LABEL_VALUES - 1,
        ),
        counter(
            "flexd_slow_memory_rows_missed", "Of those, rows that were in slow memory.", by_table("missed"),
            ("table",), MAX_LABEL_VALUES - 1,
        ),
        counter("flexd_slow_memory_read_bytes", "Read from slow memory by all ranks.", "bytes_read"),
        counter("flexd_slow_memory_written_bytes", "Written to slow memory by all ranks.", "bytes_written"),
        gauge("flexd_slow_memory_wait_ratio", "Recent wait for slow memory as a share of the steps.", "wait_share"),
    )  # fmt: skip


def slow_memory_status(totals: SlowMemoryTotals | None, tables: Sequence[TableSpec]) -> SlowMemoryStatus | None:
    """Return the sums of all ranks; None if no rank has rows in slow memory."""
    from flexd.control.protocol.report import SLOW_TABLE_QUANTITIES

    if totals is None:
        return None
    names = (*(table.name for table in tables), OTHERS)
    shown = tuple(
        SlowTableStatus(table=name, **dict(zip(SLOW_TABLE_QUANTITIES, counts, strict=True)))
        for name, counts in zip(names, totals.by_table.tolist(), strict=True)
        if any(counts)
    )
    sums = dict(zip(SLOW_TABLE_QUANTITIES, totals.by_table.sum(axis=0).tolist(), strict=True))
    return SlowMemoryStatus.from_object(totals, **sums, tables=shown)


class IdsTableStatus(Model):
    """Unbounded ids of one table over all ranks; counts since the daemon started, shares and rates recent."""

    table: str
    rows: int
    rows_used: int = 0
    """Rows that ids have; the last row is shared by those that have none."""
    look_ups: int = 0
    own: int = 0
    """Of the look-ups those of ids that had a row of their own."""
    admitted: int = 0
    """Ids that were given a row..."""
    evicted: int = 0
    """... which another id lost."""
    refused: int = 0
    """Ids that were seen the first time where a row is given at the second look-up."""
    pinned: int = 0
    """Ids without a row because all that they could have were used in the same step or the one before."""
    own_share: FiniteOrNone = None
    """Own look-ups as a share of all."""
    own_share_of_half_the_rows: FiniteOrNone = None
    """The same with half of the rows, by the order in which ids would lose them..."""
    own_share_of_twice_the_rows: FiniteOrNone = None
    """... and with twice as many: extrapolated from a quarter, a half and all."""
    evictions_per_1000: FiniteOrNone = None
    """Look-ups."""


class IdsStatus(Model):
    """Tables of unbounded ids."""

    tables: tuple[IdsTableStatus, ...] = ()
    of_stream: tuple[IdsOfStream, ...] = ()
    """Of the tables whose ids the stream has."""

    FAMILIES = (
        gauge("flexd_ids_rows_used", "Rows that unbounded ids have, by table.", by_table("rows_used"), *_OF_TABLES),
        counter("flexd_ids_look_ups", "Look-ups of unbounded ids for training.", by_table("look_ups"), *_OF_TABLES),
        counter("flexd_ids_own_look_ups", "Of those, of ids that had a row.", by_table("own"), *_OF_TABLES),
        counter("flexd_ids_admitted", "Unbounded ids that were given a row.", by_table("admitted"), *_OF_TABLES),
        counter("flexd_ids_evicted", "Unbounded ids that lost their row.", by_table("evicted"), *_OF_TABLES),
        counter(
            "flexd_ids_refused", "Unbounded ids that were seen first, where a row needs two look-ups.",
            by_table("refused"), *_OF_TABLES,
        ),
    )  # fmt: skip


def ids_status(
    totals: Mapping[int, IdsTotals], seen: Mapping[str, IdsSeen], tables: Sequence[TableSpec]
) -> IdsStatus | None:
    """Return what is known of the tables of unbounded ids; None without any."""
    from flexd.control.protocol.report import IDS_QUANTITIES

    if not totals and not seen:
        return None
    found = []
    for number, of_table in totals.items():
        counts = dict(zip(IDS_QUANTITIES, of_table.counts.tolist(), strict=True))
        recent = dict(zip(IDS_QUANTITIES, of_table.recent.tolist(), strict=True))
        shown = {name: counts[name] for name in ("look_ups", "own", "admitted", "evicted", "refused", "pinned")}
        known: dict[str, Any] = {**shown, **_id_shares(recent)}
        spec = tables[number]
        found.append(IdsTableStatus(table=spec.name, rows=spec.rows, rows_used=of_table.used_slots, **known))
    return IdsStatus(tables=tuple(found), of_stream=IdsOfStream.of_tables(seen, tables))


def _id_shares(recent: Mapping[str, float]) -> dict[str, float]:
    """Return the shares and rates of ``IdsTableStatus``, of recent counts."""
    if not recent["look_ups"]:
        return {}
    own = recent["own"] / recent["look_ups"]
    found = {
        "own_share": own, "evictions_per_1000": 1000 * recent["evicted"] / recent["look_ups"]
    }  # fmt: skip
    if recent["sampled"]:
        half, quarter = (own * recent[name] / recent["sampled"] for name in ("in_half", "in_quarter"))
        # Each doubling adds the same share of what the one before has added, and at most as much.
        ratio = min(1.0, (own - half) / (half - quarter)) if half > quarter else 1.0
        found["own_share_of_half_the_rows"] = half
        found["own_share_of_twice_the_rows"] = min(1.0, own + (own - half) * ratio)
    return found


class PhaseStatus(Model):
    """One phase of a training step: the mean over the ranks and about 50 of their newest steps."""

    phase: str
    """``ids``, ``rows``, ``dense`` (everything outside flexd), ``push`` (of gradients), ``sync`` (of replicas),
    ``update`` (of rows) or ``apply`` (of chunks)."""
    computed_seconds: FiniteOrNone = None
    """Outside collectives."""
    exposed_seconds: FiniteOrNone = None
    """Waited for collectives: what compute did not cover."""
    intra_seconds: FiniteOrNone = None
    """Collectives inside the nodes, covered or not."""
    inter_seconds: FiniteOrNone = None
    """Collectives that leave the nodes, covered or not."""
    overlapped_seconds: FiniteOrNone = None
    """Part of both that ran beside the training thread."""
    intra_bytes: FiniteOrNone = None
    inter_bytes: FiniteOrNone = None
    intra_collectives: FiniteOrNone = None
    inter_collectives: FiniteOrNone = None


class UsageWarningStatus(Model):
    """A kind of usage warning of the ranks' trainers."""

    kind: str
    """``row_counts``, ``changed_ids``, ``partial_state_dict`` (``state_dict()`` on some ranks only),
    ``differing_seeds``, ``clipped_by_torch`` (``torch.nn.utils.clip_grad_norm_`` of rows),
    ``no_backward`` (rows moved by momentum or decay alone) or ``numpy`` (one that pyarrow refuses); ``other`` from a
    newer flexd."""
    count: int
    """Over all ranks, since the daemon started."""
    rank: int
    """The rank that reported the newest."""
    text: str
    heard_unix_seconds: float = 0.0


class PrefetchStatus(Model):
    """Batches that ``flexd.prefetch`` was given to locate ahead, over all ranks."""

    located: int = 0
    unused: int = 0

    FAMILIES = (
        counter(
            "flexd_training_unused_prefetches",
            "Batches that flexd.prefetch located ahead for nothing, over all ranks: the loop changed their ids.",
            "unused",
        ),
        counter(
            "flexd_training_prefetches",
            "Batches that flexd.prefetch was given to locate ahead, over all ranks, those for nothing included.",
            "located",
        ),
    )


class ArmStatus(Model):
    """A typical step with one choice of exchange and prefetch pipeline, as the ranks have measured it."""

    arm: str
    """``chain`` or ``direct``, ``with prefetch`` where batches are located ahead."""
    step_seconds: float
    in_use: bool = False


class TuningStatus(Model):
    """Exchange and prefetch pipeline that the ranks use, and what they have measured of the others."""

    exchange: str = ""
    """``chain`` or ``direct``; several while it changes, empty until a rank has reported."""
    arm: str = ""
    """The same, ``with prefetch`` where batches are located ahead."""
    reason: str = ""
    """Why: ``configured`` by the trainer; or chosen by it: ``start``, ``priced`` by the daemon, ``measured``, or in a
    ``trial``; empty until a rank has reported."""
    measured_at_step: int = 0
    """Step of the newest measurement; 0 before any."""
    arms: tuple[ArmStatus, ...] = ()
    """Choices by measured step; empty before any."""

    FAMILIES = (
        gauge(
            "flexd_training_arm_step_seconds",
            "A typical step with each choice of exchange and prefetch pipeline, as the ranks have measured it.",
            lambda tuning: {each.arm: each.step_seconds for each in tuning.arms}, ("arm",),
        ),
    )  # fmt: skip


def tuning_status(used: Sequence[UsedExchange]) -> TuningStatus:
    """Return what the ranks use, from their newest reports."""
    from flexd.control.protocol.report import UsedExchange

    decides = next((each for each in used if each.reason), UsedExchange())
    return TuningStatus(
        exchange=", ".join(sorted({each.name for each in used if each.name})),
        arm=decides.arm,
        reason=decides.reason,
        measured_at_step=decides.measured_at_step,
        arms=tuple(
            ArmStatus(arm=each.arm, step_seconds=each.seconds, in_use=each.arm == decides.arm)
            for each in sorted(decides.arms, key=lambda each: each.seconds)
        ),
    )


class TrainingStatus(Model):
    """Sums over all ranks since the daemon started."""

    accesses: RowsByTier = Field(default_factory=dict)
    """Look-ups by the tier of the row that served them."""
    sent_bytes: Annotated[dict[str, dict[str, int]], HIDDEN] = Field(default_factory=dict)
    """Bytes measured by the senders, by kind of traffic (``all_to_all``, ``sync``, ``migration``) and link
    (``intra``, ``inter``)."""
    steps: int = 0
    step_seconds: Annotated[float, HIDDEN] = 0.0
    apply_seconds: Annotated[float, HIDDEN] = 0.0
    newest_step: int = 0
    prefetches: PrefetchStatus = PrefetchStatus()
    usage_warnings: tuple[UsageWarningStatus, ...] = ()
    """Usage warnings of the trainers by kind, the newest first."""
    tuning: TuningStatus = TuningStatus()
    phases: tuple[PhaseStatus, ...] = ()
    """A step by phase; empty until a rank has reported."""
    cover_seconds: FiniteOrNone = None
    """Compute of a step that could cover the collectives of the prefetch pipeline."""

    FAMILIES = (
        counter(
            "flexd_training_accesses", "Lookups, by the tier of the row that served them.",
            lambda training: by_metric_tier(training.accesses), ("tier",),
        ),
        counter(
            "flexd_training_sent_bytes",
            "Bytes that the ranks measured where they send, by kind of traffic and link.",
            lambda training: training.by_kind_and_link(), ("kind", "link"),
        ),
        summary(
            "flexd_training_step_duration_seconds", "Wall time of training steps, over all ranks.",
            lambda training: (training.steps, training.step_seconds),
        ),
        counter(
            "flexd_training_apply_seconds", "Step time spent in applying chunks, over all ranks.", "apply_seconds"
        ),
        gauge("flexd_training_step", "The newest step that any rank reported.", "newest_step"),
        counter(
            "flexd_training_usage_warnings", "Usage warnings of the trainers' ranks, by kind.",
            lambda training: with_zeros(
                [kind.value for kind in UsageWarningKind], {each.kind: each.count for each in training.usage_warnings}
            ),
            ("kind",),
        ),
        gauge(
            "flexd_training_phase_seconds",
            "A step by phase, mean over the ranks: computed, exposed (waited for collectives), and in collectives "
            "inside nodes and between them, covered by compute or not.",
            lambda training: training.by_phase_and_part(), ("phase", "part"),
        ),
    )  # fmt: skip

    def by_kind_and_link(self) -> dict[tuple[str, str], int]:
        """Return the bytes sent by kind of traffic and link; 0 for those that none has sent."""
        from flexd.operations.training_monitor import LINKS, TRAFFIC_KINDS

        return {(kind, link): self.sent_bytes.get(kind, {}).get(link, 0) for kind in TRAFFIC_KINDS for link in LINKS}

    def by_phase_and_part(self) -> dict[tuple[str, str], float | None]:
        """Return the seconds by phase and part; None for those that no rank has reported."""
        from flexd.core.step_phases import StepPhase

        known, unknown = {phase.phase: phase for phase in self.phases}, PhaseStatus(phase="")
        return {
            (phase.value, part): getattr(known.get(phase.value, unknown), f"{part}_seconds")
            for phase in StepPhase
            for part in ("computed", "exposed", "intra", "inter")
        }


def training_status(
    totals: StepReport,
    ranks: Mapping[int, RankAverages],
    phases: PhaseAverages | None,
    usage_warnings: Sequence[UsageWarningTotal] = (),
) -> TrainingStatus:
    """Return the sums over all step reports, and the newest steps by phase.

    Args:
        ranks: those that have reported.
    """
    from flexd.control.protocol.report import PHASE_QUANTITIES
    from flexd.core.step_phases import StepPhase
    from flexd.operations.training_monitor import LINKS, TRAFFIC_KINDS

    home, node, device = totals.accesses_by_tier
    return TrainingStatus.from_object(
        totals,
        prefetches=PrefetchStatus(located=totals.batches.prefetches, unused=totals.batches.unused_prefetches),
        usage_warnings=tuple(UsageWarningStatus.from_object(each) for each in usage_warnings),
        accesses={"HOME": home, "NODE": node, "DEVICE": device},
        sent_bytes={
            kind: {link: getattr(totals.sent, f"{kind}_{link}_bytes") for link in LINKS} for kind in TRAFFIC_KINDS
        },
        newest_step=totals.step,
        tuning=tuning_status([rank.used for rank in ranks.values()]),
        cover_seconds=None if phases is None else phases.cover_seconds,
        phases=()
        if phases is None
        else tuple(
            PhaseStatus(phase=phase.value, **dict(zip(PHASE_QUANTITIES, values, strict=True)))
            for phase, values in zip(StepPhase, phases.values.tolist(), strict=True)
        ),
    )


ID_BYTES = 8
"""Size of a row id in an exchange."""
MAX_PLAN_MARKS = 100


class TrafficSample(Model):
    """Step reports of the ranks in one interval."""

    unix_seconds: float
    """Begin of the interval."""
    steps: int = 0
    accesses: RowsByTier = Field(default_factory=dict)
    """Look-ups by the tier of the row that served them, per rank and step."""
    inter_node_bytes: FiniteOrNone = None
    """Bytes sent to other nodes for rows and their synchronisation, per rank and step; null without steps."""
    all_to_all_inter_node_bytes: FiniteOrNone = None
    """Of ``inter_node_bytes``: ids, rows and gradients on their way to and from homes and node owners."""
    sync_inter_node_bytes: FiniteOrNone = None
    """Of ``inter_node_bytes``: synchronisation of replicas."""
    intra_node_bytes: FiniteOrNone = None
    """Bytes sent inside the nodes for rows and their synchronisation, per rank and step; null without steps."""
    migration_bytes: FiniteOrNone = None
    """Bytes sent to migrate rows, over both links, per rank and step."""
    row_wise_inter_node_bytes: FiniteOrNone = None
    """Bytes that row-wise sharding without dedup would send between nodes; null until ranks are known."""
    step_seconds: FiniteOrNone = None
    """Wall time of a step, the mean of all ranks."""


class Timeline(Model):
    """The newest samples and plans, oldest first."""

    interval_seconds: float
    samples: tuple[TrafficSample, ...] = ()
    """Samples of the last half hour; intervals without a report are left out."""
    plans: tuple[MigrationRecord, ...] = ()


def timeline(
    intervals: Sequence[TrafficInterval],
    plans: Sequence[MigrationRecord],
    layout: RankLayout | None,
    row_bytes: float,
) -> Timeline:
    """Return traffic and plans, oldest first.

    Args:
        plans: migrations that moved rows, the newest first.
        layout: of the live ranks; None before ranks are known.
        row_bytes: mean size of a looked-up row's values.
    """
    from flexd.operations.training_monitor import INTERVAL_SECONDS

    share = None if layout is None else 1 - layout.local_ranks / layout.world_size
    return Timeline(
        interval_seconds=INTERVAL_SECONDS,
        samples=tuple(_sample(interval, INTERVAL_SECONDS, share, row_bytes) for interval in intervals),
        plans=tuple(plan.model_copy(update={"transitions": ()}) for plan in reversed(plans)),
    )


def row_wise_inter_node_bytes(accesses: float, row_bytes: float, other_nodes_share: float) -> float:
    """Return the bytes that row-wise sharding without dedup sends between nodes, per rank and step.

    Every rank requests every look-up from its home: an id goes out, a row comes back, a gradient goes out. A rank sends
    as much as it receives in the mean, so rows and gradients count once each.

    Args:
        accesses: look-ups of a rank in a step.
        row_bytes: size of a row's values.
        other_nodes_share: share of the rows whose home is in another node.
    """
    return accesses * (2 * row_bytes + ID_BYTES) * other_nodes_share


def _sample(
    interval: TrafficInterval, interval_seconds: float, other_nodes_share: float | None, row_bytes: float
) -> TrafficSample:
    begun, sums = interval.index * interval_seconds, interval.sums
    steps, sent = sums.steps, sums.sent
    if steps == 0:
        return TrafficSample(unix_seconds=begun)
    home, node, device = (accesses / steps for accesses in sums.accesses_by_tier)
    accesses = home + node + device
    return TrafficSample(
        unix_seconds=begun,
        steps=steps,
        accesses={"HOME": round(home), "NODE": round(node), "DEVICE": round(device)},
        inter_node_bytes=(sent.all_to_all_inter_bytes + sent.sync_inter_bytes) / steps,
        all_to_all_inter_node_bytes=sent.all_to_all_inter_bytes / steps,
        sync_inter_node_bytes=sent.sync_inter_bytes / steps,
        intra_node_bytes=(sent.all_to_all_intra_bytes + sent.sync_intra_bytes) / steps,
        migration_bytes=(sent.migration_intra_bytes + sent.migration_inter_bytes) / steps,
        row_wise_inter_node_bytes=None
        if other_nodes_share is None
        else row_wise_inter_node_bytes(accesses, row_bytes, other_nodes_share),
        step_seconds=sums.step_seconds / steps,
    )
