"""What a step takes beside its links, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexd.core import units

if TYPE_CHECKING:
    from flexd.topology.cluster import Cluster


def step_cost_words(cluster: Cluster) -> str:
    costs = cluster.step_costs
    if costs is None:
        return "not measured: latencies and an assumed memory bandwidth; flexd probe measures it"
    return (
        f"{units.seconds(costs.sums_seconds)} with tables pooled at the owner, "
        f"{units.seconds(costs.copies_seconds)} with copies on every rank, "
        f"rows at {units.size(costs.row_bytes_per_second)}/s"
    )
