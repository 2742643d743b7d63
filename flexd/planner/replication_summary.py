"""Compare a plan with the same exchange without replicas, in figures and sentences."""

from __future__ import annotations

from typing import Any

from flexd.core.layout import Tier
from flexd.planner.model.cost import CostBreakdown
from flexd.planner.model.row_bytes import Phase, TrafficLink
from flexd.topology.cluster import Cluster, Collective, Link


def summarise_replication(
    home: CostBreakdown,
    plan: CostBreakdown,
    cluster: Cluster,
    dedup: CostBreakdown,
) -> dict[str, Any]:
    """Return figures per rank and step, and ``words``: sentences that state them.

    Args:
        home: cost of the chain without replicas.
        plan: cost of the same chain with the plan's replicas.
        dedup: cost of row-wise sharding with dedup.
    """
    link = cluster.link(Link.INTER_NODE)
    exchange_bytes = max(plan.all_to_all_bytes(TrafficLink.INTER_NODE), home.all_to_all_bytes(TrafficLink.INTER_NODE))
    sync_bytes = plan.sync_bytes(TrafficLink.INTER_NODE)
    all_to_all = cluster.curve(Link.INTER_NODE, Collective.ALL_TO_ALL).bandwidth(exchange_bytes)
    all_reduce = cluster.curve(Link.INTER_NODE, Collective.ALL_REDUCE).bandwidth(sync_bytes)
    figures = {
        "replicated_rows": float(plan.rows[Tier.NODE] + plan.rows[Tier.DEVICE]),
        "saved_exposed_seconds": home.exposed_seconds - plan.exposed_seconds,
        "ids_not_sent": home.ids_sent - plan.ids_sent,
        "ids_not_sent_seconds": _seconds(home, Phase.FORWARD_IDS) - _seconds(plan, Phase.FORWARD_IDS),
        "forward_freed_seconds": home.forward_seconds - plan.forward_seconds,
        "forward_freed_inter_node_bytes": _forward_bytes(home) - _forward_bytes(plan),
        "backward_freed_seconds": home.backward_seconds - plan.backward_seconds,
        "sync_seconds": plan.sync_seconds,
        "inter_node_all_to_all_bytes_saved": home.all_to_all_bytes(TrafficLink.INTER_NODE)
        - plan.all_to_all_bytes(TrafficLink.INTER_NODE),
        "inter_node_sync_bytes_added": sync_bytes,
        "all_to_all_bytes_per_second": all_to_all,
        "all_reduce_bytes_per_second": all_reduce,
        "all_to_all_wire_share": all_to_all / link.wire_bytes_per_second,
        "all_reduce_wire_share": all_reduce / link.wire_bytes_per_second,
    }
    words = _words(figures, cluster, narrow=plan.summed_at_home)
    if dedup.exposed_seconds < plan.exposed_seconds:
        words.append(
            f"row-wise sharding with dedup (exchange 'direct') would take {_time(dedup.exposed_seconds)} a step, this "
            f"plan {_time(plan.exposed_seconds)}: latency dominates here. A running job cannot change "
            "its exchange; start the next one with it"
        )
    return figures | {"words": words}


def _words(figures: dict[str, float], cluster: Cluster, *, narrow: bool) -> list[str]:
    ratio = figures["all_reduce_bytes_per_second"] / figures["all_to_all_bytes_per_second"]
    bandwidth = (
        f"between nodes an all-reduce moves {_size(figures['all_reduce_bytes_per_second'])}/s a rank "
        f"({figures['all_reduce_wire_share']:.0%} of the wire), an all-to-all "
        f"{_size(figures['all_to_all_bytes_per_second'])}/s ({figures['all_to_all_wire_share']:.0%}): "
        f"{ratio:.2f} times as much"
    )
    if narrow:
        bandwidth = (
            "gradients travel narrower than they are added (in float32), so copies are summed at their homes and "
            "receive the sums by all-to-all; an all-reduce would round at every addition"
        )
    if figures["replicated_rows"] == 0:
        return [
            "no row is replicated: at these bandwidths, latencies and budgets no copy pays for its synchronisation "
            f"({bandwidth})"
        ]
    share = cluster.exposed
    return [
        _saving(figures["saved_exposed_seconds"]),
        f"ids: {figures['ids_not_sent']:,.0f} requests a rank and step are not sent "
        f"({_time(figures['ids_not_sent_seconds'])})",
        bandwidth[0].upper() + bandwidth[1:],
        f"the forward exchange takes {_time(figures['forward_freed_seconds'])} less and "
        f"sends {_size(figures['forward_freed_inter_node_bytes'])} less between nodes; the backward exchange takes "
        f"{_time(figures['backward_freed_seconds'])} less; the synchronisation takes {_time(figures['sync_seconds'])} "
        f"(exposed: forward {share.forward:.0%}, backward {share.backward:.0%}, synchronisation {share.sync:.0%})",
        f"replication saves time, not bytes: {_size(figures['inter_node_all_to_all_bytes_saved'])} of all-to-all "
        f"between nodes become {_size(figures['inter_node_sync_bytes_added'])} of synchronisation",
    ]


def _saving(seconds: float) -> str:
    against = "exposed communication a step against the same chain with every row at home"
    if seconds >= 0:
        return f"replicas save {_time(seconds)} of {against}"
    return f"replicas cost {_time(-seconds)} more {against}"


def _seconds(cost: CostBreakdown, phase: Phase) -> float:
    return float(cost.phase_seconds[phase].sum())


def _forward_bytes(cost: CostBreakdown) -> float:
    return float(cost.bytes[:, [Phase.FORWARD_IDS, Phase.FORWARD_ROWS], TrafficLink.INTER_NODE].sum())


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _size(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"
