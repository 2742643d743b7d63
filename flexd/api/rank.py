"""The ranks one by one, a page at a time, as the admin API tells them."""

from __future__ import annotations

from flexd.api.base import FiniteOrNone, Model


class RankReport(Model):
    """One rank. Averages are over about its newest 50 steps; null until it has reported."""

    rank: int
    """In the job."""
    node: int
    """That it is in."""
    local_rank: int
    """In its node."""
    placement_version: int | None = None
    """As it reported last."""
    behind: int | None = None
    """Placement versions that the daemon is ahead of it."""
    step: int | None = None
    """The newest it reported."""
    heard_seconds_ago: FiniteOrNone = None
    """Since its newest report."""
    step_seconds: FiniteOrNone = None
    """Wall time of a step."""
    accesses_per_step: FiniteOrNone = None
    """Look-ups of a step."""
    replica_share: FiniteOrNone = None
    """Of its look-ups that rows above HOME answered, 0-1."""
    intra_node_bytes_per_step: FiniteOrNone = None
    """Sent inside the node in a step, of all kinds."""
    inter_node_bytes_per_step: FiniteOrNone = None
    """Sent to other nodes in a step, of all kinds."""


class RankPage(Model):
    """Some of the ranks, and what they are together."""

    generation: int = 0
    """Counts the changes of the live ranks."""
    attempt: str | None = None
    """The job attempt of the live ranks."""
    nodes: int = 0
    """Nodes of the training job."""
    local_ranks: int = 0
    """Ranks in each node."""
    ready: bool = False
    """Whether every rank is there and plans can be pushed."""
    problem: str | None = None
    """Why not, if not."""
    replica_slots: tuple[int, ...] = ()
    """For each dim-group, what every rank has."""
    cluster: str = ""
    """Name of the cluster description that prices plans."""
    placement_version: int = 0
    """That every rank has agreed on."""
    imbalance: FiniteOrNone = None
    """Bytes that the busiest rank sends in a step, over the mean of those that have reported."""
    total: int = 0
    """Ranks that there are."""
    offset: int = 0
    """The first rank of the page."""
    ranks: tuple[RankReport, ...] = ()
    """The entries."""
