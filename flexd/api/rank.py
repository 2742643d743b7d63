"""The training ranks one by one and together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from flexd.core.model import FiniteOrNone, Model, Show, counter, gauge, with_zeros

if TYPE_CHECKING:
    from flexd.control.daemon.channel_events import ChannelCounters
    from flexd.control.daemon.epoch_manager import ControlStatus, LiveTopology
    from flexd.core.placement import RankLayout
    from flexd.operations.training_monitor import RankAverages


class RefusedRankStatus(Model):
    """A rank whose registration was refused."""

    attempt: str
    rank: int
    reason: str
    """The difference between it and the daemon."""


class LiveJob(Model):
    """The live ranks together."""

    generation: int = 0
    """Counts the changes of the live ranks."""
    attempt: str | None = None
    nodes: int = 0
    local_ranks: int = 0
    """Ranks in each node."""
    ready: bool = False
    """True if every rank is there and plans can be pushed."""
    problem: str | None = None
    """Reason why they are not ready; null if they are."""


class ChannelStatus(Model):
    """The control channel to the ranks; counters run since the daemon started."""

    refused_messages: dict[str, int] = Field(default_factory=dict)
    malformed_reports: dict[str, int] = Field(default_factory=dict)
    refused_chunks: int = 0
    connections: int = 0
    """Connections to the control port that have proven themselves, now."""
    connections_unproven: int = 0
    """Connections to it that have not, now."""
    proven_connections: int = 0
    refused_connections: dict[str, int] = Field(default_factory=dict)
    queued_bytes: int = 0
    unread_bytes: int = 0

    def refusals(self) -> str:
        """Return the refused connections in words; empty if there are none."""
        return ", ".join(f"{reason} {number}" for reason, number in self.refused_connections.items() if number)

    FAMILIES = (
        counter(
            "flexd_control_refused_messages", "Control messages refused, by kind.", "refused_messages", ("kind",)
        ),
        counter(
            "flexd_control_malformed_reports", "Step reports refused, by the field that was not in order.",
            "malformed_reports", ("field",),
        ),
        counter("flexd_control_refused_chunks", "Chunks that a rank refused whole.", "refused_chunks"),
        gauge(
            "flexd_control_connections", "Connections to the control port, proven and not.",
            lambda channel: {"proven": channel.connections, "unproven": channel.connections_unproven}, ("state",),
        ),
        counter("flexd_control_proven_connections", "Connections that proved themselves.", "proven_connections"),
        counter(
            "flexd_control_refused_connections", "Connections that ended before they had proven themselves, by reason.",
            "refused_connections", ("reason",),
        ),
        gauge("flexd_control_queued_bytes", "In memory, waiting to be sent to ranks.", "queued_bytes"),
        gauge("flexd_control_unread_bytes", "In memory, received and not handled yet.", "unread_bytes"),
    )  # fmt: skip


class TopologyStatus(LiveJob):
    """The training ranks that have registered."""

    missing_ranks: tuple[int, ...] = ()
    """Ranks of the newest attempt that are not here; when none is here, all of the last attempt that was complete."""
    refused_ranks: tuple[RefusedRankStatus, ...] = ()
    """Ranks that the daemon refused in the last seconds, newest first."""
    attempts_waiting: int = 0
    cluster: str | None = None
    """Name of the cluster description that prices plans."""
    ranks: int = 0
    ranks_ready: int = 0
    epochs: int = 0
    channel: ChannelStatus = ChannelStatus()

    FAMILIES = (
        counter("flexd_control_epochs", "Epochs of the control channel begun.", "epochs"),
        gauge("flexd_control_topology_generation", "Changes of the live ranks.", "generation"),
        gauge("flexd_control_ranks", "Ranks that the live attempt has.", "ranks"),
        gauge(
            "flexd_control_ranks_ready", "Ranks of the live attempt that joined the control channel.", "ranks_ready"
        ),
        gauge(
            "flexd_control_attempts_waiting", "Attempts that are refused because another one holds the job.",
            "attempts_waiting",
        ),
    )  # fmt: skip


class RankReport(Model):
    """One rank. Averages are over about its newest 50 steps; null until it has reported."""

    rank: int
    node: int
    local_rank: int
    placement_version: Annotated[int | None, Show("version")] = None
    behind: int | None = None
    """Placement versions that the daemon is ahead of it."""
    step: int | None = None
    report_age_seconds: Annotated[FiniteOrNone, Show("heard")] = None
    step_seconds: Annotated[FiniteOrNone, Show("step time")] = None
    computed_seconds: FiniteOrNone = None
    """Part of a step outside collectives."""
    exposed_seconds: FiniteOrNone = None
    """Part of a step that waits for collectives: what compute does not cover."""
    exchange: str = ""
    """The exchange after its newest step; empty until it has reported."""
    accesses_per_step: Annotated[FiniteOrNone, Show("accesses")] = None
    replica_share: FiniteOrNone = None
    """Share of its look-ups that rows above HOME served, 0-1."""
    intra_node_bytes_per_step: Annotated[FiniteOrNone, Show("bytes in node")] = None
    """Bytes of all kinds sent inside the node in a step."""
    inter_node_bytes_per_step: Annotated[FiniteOrNone, Show("bytes between nodes")] = None
    """Bytes of all kinds sent to other nodes in a step."""


class RankPage(LiveJob):
    """Some of the ranks, and the job that they make up."""

    replica_slots: tuple[int, ...] = ()
    """Replica slots of every rank, for each dim-group."""
    cluster: str = ""
    placement_version: int = 0
    imbalance: FiniteOrNone = None
    """Bytes that the busiest rank sends in a step, over the mean of those that have reported."""
    total: int = 0
    offset: int = 0
    ranks: tuple[RankReport, ...] = ()

    FAMILIES = (
        gauge(
            "flexd_rank_placement_version", "Placement version in the newest report of each rank.",
            lambda page: page.of_reported("placement_version"), ("rank",),
        ),
        gauge(
            "flexd_rank_step_seconds", "Wall time of a step of each rank, over its newest steps.",
            lambda page: page.of_reported("step_seconds"), ("rank",),
        ),
    )  # fmt: skip

    def of_reported(self, field: str) -> dict[int, float | None]:
        """Return a field of the ranks on the page that have reported, by rank."""
        return {rank.rank: getattr(rank, field) for rank in self.ranks if rank.step is not None}


def topology_status(
    live: LiveTopology | None,
    control: ControlStatus,
    channel: ChannelCounters,
    cluster: str,
) -> TopologyStatus:
    """Return the ranks that have registered and the state of the control channel."""
    from flexd.control.daemon.channel_events import REFUSED_REASONS

    status = ChannelStatus.from_object(
        control,
        connections=channel.peers,
        connections_unproven=channel.unproven,
        proven_connections=channel.proven,
        refused_connections=with_zeros(REFUSED_REASONS, channel.refused),
        queued_bytes=channel.queued_bytes,
        unread_bytes=channel.unread_bytes,
    )
    return TopologyStatus.from_object(
        control,
        refused_ranks=tuple(RefusedRankStatus.from_object(each) for each in control.refused_ranks),
        attempt=control.presence.attempt or None,
        ranks=control.presence.expected,
        ranks_ready=control.presence.present,
        missing_ranks=control.presence.missing,
        nodes=live.layout.nodes if live else 0,
        local_ranks=live.layout.local_ranks if live else 0,
        ready=live is not None and live.ready,
        cluster=cluster,
        problem=control.reason or None,
        channel=status,
    )


def rank_page(
    live: LiveTopology | None,
    reported: dict[int, RankAverages],
    placement_version: int,
    cluster: str,
    offset: int,
    limit: int,
) -> RankPage:
    """Return at most ``limit`` ranks from ``offset`` on.

    Args:
        reported: averages of the ranks that have reported.
    """
    if live is None:
        return RankPage(problem="no rank is registered", cluster=cluster, placement_version=placement_version)
    layout = live.layout
    sent = [rank.intra_bytes + rank.inter_bytes for rank in reported.values()]
    mean = sum(sent) / len(sent) if sent else 0.0
    return RankPage.from_object(
        live,
        nodes=layout.nodes,
        local_ranks=layout.local_ranks,
        problem=live.reason or None,
        cluster=cluster,
        placement_version=placement_version,
        imbalance=max(sent) / mean if mean > 0 else None,
        total=layout.world_size,
        offset=offset,
        ranks=tuple(
            _rank(rank, layout, reported.get(rank), placement_version)
            for rank in range(offset, min(offset + limit, layout.world_size))
        ),
    )


def _rank(rank: int, layout: RankLayout, known: RankAverages | None, placement_version: int) -> RankReport:
    node, local_rank = layout.node_of(rank), layout.local_rank_of(rank)
    if known is None:
        return RankReport(rank=rank, node=node, local_rank=local_rank)
    return RankReport.from_object(
        known,
        rank=rank,
        node=node,
        local_rank=local_rank,
        placement_version=known.version,
        behind=max(0, placement_version - known.version),
        report_age_seconds=time.monotonic() - known.heard_at,
        intra_node_bytes_per_step=known.intra_bytes,
        inter_node_bytes_per_step=known.inter_bytes,
    )
