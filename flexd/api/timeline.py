"""Traffic of the last half hour and the plans that moved rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model, RowsByTier

if TYPE_CHECKING:
    from flexd.control.daemon.migration_record import MigrationRecord
    from flexd.core.layout import RankLayout
    from flexd.operations.training_monitor import TrafficInterval

ID_BYTES = 8
"""Size of a row id in an exchange."""
MAX_PLAN_MARKS = 100


class TrafficSample(Model):
    """Step reports of the ranks in one interval."""

    unix_seconds: float
    """Begin of the interval."""
    steps: int = 0
    """Steps of all ranks."""
    accesses: RowsByTier = Field(default_factory=dict)
    """Look-ups by the tier of the row that served them, a rank and step."""
    inter_node_bytes: FiniteOrNone = None
    """Bytes sent to other nodes for rows and their synchronisation, a rank and step; null without steps."""
    all_to_all_inter_node_bytes: FiniteOrNone = None
    """Of ``inter_node_bytes``: ids, rows and gradients on their way to and from homes and node owners."""
    sync_inter_node_bytes: FiniteOrNone = None
    """Of ``inter_node_bytes``: synchronisation of replicas."""
    intra_node_bytes: FiniteOrNone = None
    """Bytes sent inside the nodes for rows and their synchronisation, a rank and step; null without steps."""
    migration_bytes: FiniteOrNone = None
    """Bytes sent to migrate rows, over both links, a rank and step."""
    row_wise_inter_node_bytes: FiniteOrNone = None
    """Bytes that row-wise sharding without dedup would send between nodes; null until ranks are known."""
    step_seconds: FiniteOrNone = None
    """Wall time of a step, the mean of all ranks."""


class PlanMark(Model):
    """A plan that moved rows."""

    plan_id: str
    """Id of the plan."""
    reason: str = ""
    """Reason of its trigger."""
    created_unix_seconds: float = 0.0
    """When it was made."""
    state: str = ""
    """Final state of its migration."""
    promotions: int = 0
    """Rows that got more copies."""
    demotions: int = 0
    """Rows that lost copies."""
    rows_applied: int = 0
    """Rows whose tier every rank has changed."""


class Timeline(Model):
    """The newest samples and plans, oldest first."""

    interval_seconds: float
    """Length of each sample."""
    samples: tuple[TrafficSample, ...] = ()
    """Samples of the last half hour; intervals without a report are left out."""
    plans: tuple[PlanMark, ...] = ()
    """The newest plans that moved rows."""


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
        plans=tuple(PlanMark.from_object(plan, state=plan.state.value) for plan in reversed(plans)),
    )


def row_wise_inter_node_bytes(accesses: float, row_bytes: float, other_nodes_share: float) -> float:
    """Return the bytes that row-wise sharding without dedup sends between nodes, a rank and step.

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
    begun, steps = interval.index * interval_seconds, interval.steps
    if steps == 0:
        return TrafficSample(unix_seconds=begun)
    home, node, device = (accesses / steps for accesses in interval.accesses_by_tier)
    accesses = home + node + device
    return TrafficSample(
        unix_seconds=begun,
        steps=steps,
        accesses={"HOME": round(home), "NODE": round(node), "DEVICE": round(device)},
        inter_node_bytes=(interval.all_to_all_inter_bytes + interval.sync_inter_bytes) / steps,
        all_to_all_inter_node_bytes=interval.all_to_all_inter_bytes / steps,
        sync_inter_node_bytes=interval.sync_inter_bytes / steps,
        intra_node_bytes=interval.intra_bytes / steps,
        migration_bytes=interval.migration_bytes / steps,
        row_wise_inter_node_bytes=None
        if other_nodes_share is None
        else row_wise_inter_node_bytes(accesses, row_bytes, other_nodes_share),
        step_seconds=interval.step_seconds / steps,
    )
