"""Compare a plan with the same exchange without replicas, in sentences."""

from __future__ import annotations

from flexd.core.layout import Tier
from flexd.planner.model.cost import CostBreakdown
from flexd.planner.model.row_bytes import Phase, TrafficLink
from flexd.topology.cluster import Cluster, Collective, Link


def replication_words(home: CostBreakdown, plan: CostBreakdown, cluster: Cluster, dedup: CostBreakdown) -> list[str]:
    """Return sentences that state the gain and the cost of replicas per rank and step.

    Args:
        home: cost of the chain without replicas.
        plan: cost of the same chain with the plan's replicas.
        dedup: cost of row-wise sharding with dedup.
    """
    messages = _messages(home, plan, cluster)
    if dedup.exposed_seconds < plan.exposed_seconds:
        messages.append(
            f"row-wise sharding with dedup (exchange 'direct') would take {_time(dedup.exposed_seconds)} a step, this "
            f"plan {_time(plan.exposed_seconds)}: latency dominates here. A running job cannot change "
            "its exchange; start the next one with it"
        )
    return messages


def _messages(home: CostBreakdown, plan: CostBreakdown, cluster: Cluster) -> list[str]:
    between = TrafficLink.INTER_NODE
    exchanged, alone, synced = plan.all_to_all_bytes(between), home.all_to_all_bytes(between), plan.sync_bytes(between)
    wire = cluster.link(Link.INTER_NODE).wire_bytes_per_second
    reduce, to_all = (
        cluster.curve(Link.INTER_NODE, collective).bandwidth(size)
        for collective, size in (
            (Collective.ALL_REDUCE, synced), (Collective.ALL_TO_ALL, max(exchanged, alone)),
        )
    )  # fmt: skip
    bandwidth = (
        f"between nodes an all-reduce moves {_size(reduce)}/s a rank ({reduce / wire:.0%} of the wire), an all-to-all "
        f"{_size(to_all)}/s ({to_all / wire:.0%}): {reduce / to_all:.2f} times as much"
    )
    if plan.summed_at_home:
        bandwidth = (
            "gradients travel narrower than they are added (in float32), so copies are summed at their homes and "
            "receive the sums by all-to-all; an all-reduce would round at every addition"
        )
    if plan.rows[Tier.NODE] + plan.rows[Tier.DEVICE] == 0:
        return [
            "no row is replicated: at these bandwidths, latencies and budgets no copy pays for its synchronisation "
            f"({bandwidth})"
        ]
    share = cluster.exposed
    ids_seconds = _seconds(home, Phase.FORWARD_IDS) - _seconds(plan, Phase.FORWARD_IDS)
    return [
        _saving(home.exposed_seconds - plan.exposed_seconds),
        f"ids: {home.ids_sent - plan.ids_sent:,.0f} requests per rank and step are not sent ({_time(ids_seconds)})",
        bandwidth[0].upper() + bandwidth[1:],
        f"the forward exchange takes {_time(home.forward_seconds - plan.forward_seconds)} less and "
        f"sends {_size(_forward_bytes(home) - _forward_bytes(plan))} less between nodes; the backward exchange takes "
        f"{_time(home.backward_seconds - plan.backward_seconds)} less; the synchronisation takes "
        f"{_time(plan.sync_seconds)} "
        f"(exposed: forward {share.forward:.0%}, backward {share.backward:.0%}, synchronisation {share.sync:.0%})",
        f"replication saves time, not bytes: {_size(alone - exchanged)} of all-to-all "
        f"between nodes become {_size(synced)} of synchronisation",
    ]


def _saving(seconds: float) -> str:
    against = "exposed communication per step against the same chain with every row at home"
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
