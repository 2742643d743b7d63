"""Scale a cluster to a rehearsal that moves fewer bytes than the job that it models."""

from __future__ import annotations

from dataclasses import replace

from flexd.core.errors import TopologyError
from flexd.topology.cluster import Cluster

PRODUCTION_RANK_BYTES = 15.5e6 * 256
"""Bytes that a rank looks up in a production step: about 15.5M rows of 256 bytes (TorchRec's 1,935-table example). Over
those of a rehearsal's step they are the factor at which plans weigh latencies as they would there."""


def scale_model(cluster: Cluster, factor: float) -> Cluster:
    """Return the same cluster with latencies and fixed costs divided by ``factor``, which keeps their ratio to bytes.

    Curves with several points keep their message sizes, so a scale model is exact for one-point curves only.

    Raises:
        TopologyError: the factor is not a finite number of at least 1.
    """
    if not 1 <= factor < float("inf"):
        raise TopologyError(f"scale {factor!r}", remedy="give a factor of at least 1")
    if factor == 1:
        return cluster

    costs = cluster.step_costs
    if costs is not None:
        costs = replace(costs, sums_seconds=costs.sums_seconds / factor, copies_seconds=costs.copies_seconds / factor)
    return replace(
        cluster.with_curves(lambda link, curve: curve.divide_latency(factor)),
        name=f"{cluster.name}-scale-model",
        source=f"{cluster.source} Latencies divided by {factor:g}: a scale model for runs whose steps move so many "
        "times fewer bytes than a production step.",
        step_costs=costs,
    )
