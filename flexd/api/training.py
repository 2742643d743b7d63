"""The training steps as the ranks report them, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from flexd.api.base import HIDDEN, FiniteOrNone, Model, RowsByTier
from flexd.api.families import counter, counters, counters_by, gauge, gauges_by, summary, with_zeros
from flexd.api.placement import by_metric_tier

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.operations.phase_averages import PhaseAverages
    from flexd.operations.training_monitor import MistakeTotal, RankAverages, TrainingTotals


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
    """Sent inside the node by a rank."""
    inter_bytes: FiniteOrNone = None
    """Sent to other nodes by a rank."""
    intra_collectives: FiniteOrNone = None
    """Collectives inside the node."""
    inter_collectives: FiniteOrNone = None
    """Collectives that leave it."""


class MistakeStatus(Model):
    """A kind of mistake that the ranks' trainers made."""

    kind: str
    """``row_counts``, ``changed_ids``, ``lone_save`` (``state_dict()`` on some ranks only), ``differing_seeds``,
    ``clipped_by_torch`` (``torch.nn.utils.clip_grad_norm_`` of rows) or ``numpy`` (one that pyarrow refuses);
    ``other`` from a newer flexd."""
    count: int
    """Over all ranks, since the daemon started."""
    rank: int
    """The rank that reported the newest."""
    text: str
    """What it says."""
    heard_unix_seconds: float = 0.0
    """When the daemon received it."""


class TrainingStatus(Model):
    """Sums over all ranks since the daemon started."""

    accesses: RowsByTier = Field(default_factory=dict)
    """Look-ups by the tier of the row that served them."""
    sent_bytes: Annotated[dict[str, dict[str, int]], HIDDEN] = Field(default_factory=dict)
    """Bytes measured by the senders, by kind of traffic (``all_to_all``, ``sync``, ``migration``) and link
    (``intra``, ``inter``)."""
    steps: int = 0
    """Steps of all ranks."""
    step_seconds: Annotated[float, HIDDEN] = 0.0
    """Wall time of these steps."""
    apply_seconds: Annotated[float, HIDDEN] = 0.0
    """Step time spent in applying chunks."""
    newest_step: int = 0
    """The newest step that any rank reported."""
    unused_prefetches: int = 0
    """Batches whose rows ``flexd.prefetch`` located ahead for nothing, because the forward pass got other objects."""
    prefetches: int = 0
    """Batches that ``flexd.prefetch`` was given to locate ahead, those included."""
    mistakes: tuple[MistakeStatus, ...] = ()
    """Mistakes of the trainers by kind, the newest first."""
    exchange: str = ""
    """The exchange that the ranks use; several while it changes, empty until a rank has reported."""
    exchange_reason: str = ""
    """Why: ``configured`` by the trainer; or chosen by it (``auto``): ``start``, ``priced`` by the daemon,
    ``measured``, or in a ``trial``; empty until a rank has reported."""
    phases: tuple[PhaseStatus, ...] = ()
    """A step by phase; empty until a rank has reported."""
    cover_seconds: FiniteOrNone = None
    """Compute of a step that could cover the collectives of run-ahead."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of training."""
        from flexd.control.protocol.report import StepPhase
        from flexd.core.mistakes import MistakeKind
        from flexd.operations.training_monitor import LINKS, TRAFFIC_KINDS

        yield counters(
            "flexd_training_accesses", "Lookups, by the tier of the row that served them.", "tier",
            by_metric_tier(self.accesses),
        )  # fmt: skip
        yield counters_by(
            "flexd_training_sent_bytes",
            "Bytes that the ranks measured where they send, by kind of traffic and link.",
            ("kind", "link"),
            {(kind, link): self.sent_bytes.get(kind, {}).get(link, 0) for kind in TRAFFIC_KINDS for link in LINKS},
        )
        yield summary(
            "flexd_training_step_duration_seconds", "Wall time of training steps, over all ranks.", self.steps,
            self.step_seconds,
        )  # fmt: skip
        yield counter(
            "flexd_training_apply_seconds", "Step time spent in applying chunks, over all ranks.", self.apply_seconds
        )
        yield gauge("flexd_training_step", "The newest step that any rank reported.", self.newest_step)
        yield counter(
            "flexd_training_unused_prefetches",
            "Batches that flexd.prefetch located ahead for nothing, over all ranks: the loop changed their ids.",
            self.unused_prefetches,
        )
        yield counter(
            "flexd_training_prefetches",
            "Batches that flexd.prefetch was given to locate ahead, over all ranks, those for nothing included.",
            self.prefetches,
        )
        yield counters(
            "flexd_training_mistakes", "Mistakes of the trainers that ranks recognised, by kind.", "kind",
            with_zeros([kind.value for kind in MistakeKind], {each.kind: each.count for each in self.mistakes}),
        )  # fmt: skip
        known = {phase.phase: phase for phase in self.phases}
        phases = {phase.value: known.get(phase.value, PhaseStatus(phase=phase.value)) for phase in StepPhase}
        yield gauges_by(
            "flexd_training_phase_seconds",
            "A step by phase, mean over the ranks: computed, exposed (waited for collectives), and in collectives "
            "inside nodes and between them, covered by compute or not.",
            ("phase", "part"),
            {
                (name, part): getattr(phase, f"{part}_seconds")
                for name, phase in phases.items()
                for part in ("computed", "exposed", "intra", "inter")
            },
        )


def training_status(
    totals: TrainingTotals,
    ranks: Mapping[int, RankAverages],
    phases: PhaseAverages | None,
    mistakes: Sequence[MistakeTotal] = (),
) -> TrainingStatus:
    """Return the sums over all step reports, and the newest steps by phase.

    Args:
        ranks: those that have reported.
    """
    from flexd.control.protocol.report import PHASE_QUANTITIES, StepPhase
    from flexd.operations.training_monitor import LINKS, TRAFFIC_KINDS

    home, node, device = totals.accesses_by_tier
    return TrainingStatus.from_object(
        totals,
        mistakes=tuple(MistakeStatus.from_object(each) for each in mistakes),
        accesses={"HOME": home, "NODE": node, "DEVICE": device},
        sent_bytes={kind: {link: totals.sent_bytes[kind, link] for link in LINKS} for kind in TRAFFIC_KINDS},
        exchange=", ".join(sorted({rank.exchange for rank in ranks.values() if rank.exchange})),
        exchange_reason=next((rank.exchange_reason for rank in ranks.values() if rank.exchange_reason), ""),
        cover_seconds=None if phases is None else phases.cover_seconds,
        phases=()
        if phases is None
        else tuple(
            PhaseStatus(phase=phase.value, **dict(zip(PHASE_QUANTITIES, values, strict=True)))
            for phase, values in zip(StepPhase, phases.values.tolist(), strict=True)
        ),
    )
