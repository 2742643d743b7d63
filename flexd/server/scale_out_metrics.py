"""Metric families of leader and followers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from flexd.api.families import counter, counters, gauge, gauges
from flexd.server.figures import ScaleOutFigures


def scale_out_metrics(figures: ScaleOutFigures) -> Iterator[Metric]:
    """A leader's have ``followers``, a follower's ``pushed``; the others of one are zero at the other."""
    known = figures.followers
    silent = sum(follower.silent for follower in known.values())
    states = {"pushing": len(known) - silent, "silent": silent}
    yield gauges("flexd_followers", "Followers that the leader knows, by state.", "state", states)
    for name, text, values in (
        ("last_push_seconds", "Since the last push.", {n: f.last_push_seconds for n, f in known.items()}),
        ("partitions", "Partitions that it reads.", {n: f.partitions for n, f in known.items()}),
        ("lag_messages", "Not read in its partitions.", {n: f.lag_messages for n, f in known.items()}),
    ):
        yield gauges(f"flexd_follower_{name}", text, "follower", values)
    for name, text, totals in (
        ("deltas", "Deltas counted.", {n: f.accepted for n, f in known.items()}),
        ("repeated_deltas", "Deltas that were counted already.", {n: f.repeated for n, f in known.items()}),
        ("bytes", "Bytes of its deltas.", {n: f.bytes for n, f in known.items()}),
        ("accesses", "Accesses of its deltas.", {n: f.accesses for n, f in known.items()}),
    ):
        yield counters(f"flexd_follower_{name}", text, "follower", totals)
    yield counters("flexd_scale_out_refused", "Deltas and requests that the leader refused.", "reason", figures.refused)
    yield counters("flexd_scale_out_pushed", "Deltas of this follower, by outcome.", "outcome", figures.pushed)
    yield counters(
        "flexd_scale_out_push_failures", "Pushes without a final answer, by reason.", "reason", figures.failures
    )
    yield counter("flexd_scale_out_sent_bytes", "Sent to the leader.", figures.sent_bytes)
    yield counter("flexd_scale_out_restarts", "Counts dropped and read again from the leader.", figures.restarts)
    yield counter("flexd_scale_out_dropped_messages", "Messages read again for that.", figures.dropped_messages)
    yield gauge("flexd_scale_out_last_answer_seconds", "Since the leader's newest answer.", figures.last_answer_seconds)
