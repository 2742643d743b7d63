"""Scale-out: several daemons on one stream, a leader and its followers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model
from flexd.api.families import counter, counters, gauge, gauges

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Leader(Protocol):
    """The leader's part of scale-out."""

    def followers(self) -> tuple[object, ...]:
        """Return a report of each follower, with the attributes of ``FollowerStatus``."""
        ...

    def refused(self) -> Mapping[str, int]:
        """Return the refused requests and count deltas by reason, every reason included."""
        ...


class FollowerStatus(Model):
    """One follower, as its leader knows it."""

    name: str
    """Name of the follower."""
    partitions: tuple[str, ...] = ()
    """Partitions that it reads."""
    lag_messages: int = 0
    """Messages that it has not read in them, as of its last push."""
    last_push_seconds: FiniteOrNone = None
    """Since its last push."""
    silent: bool = False
    """True if the last push is longer ago than ``scale_out.follower_timeout_seconds``."""
    accepted: int = 0
    """Deltas counted since the leader started."""
    repeated: int = 0
    """Deltas that were counted already (an answer was lost)."""
    refused: dict[str, int] = Field(default_factory=dict)
    """Deltas refused, by reason."""
    bytes: int = 0
    """Bytes of all its deltas."""
    accesses: int = 0
    """Accesses of its deltas that were counted."""


class LeaderLinkStatus(Model):
    """A follower's link to its leader; counters run since it started."""

    leader: str
    """Address of the leader."""
    accepted: int = 0
    """Deltas that the leader counted."""
    repeated: int = 0
    """Deltas that it had counted already."""
    restarts: int = 0
    """Times that counts were dropped and the stream read again from the leader's positions."""
    dropped_messages: int = 0
    """Messages read again because of restarts."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Attempts that brought no final answer, by reason."""
    bytes: int = 0
    """Bytes sent."""
    last_answer_seconds: FiniteOrNone = None
    """Since the newest answer."""
    partitions: tuple[str, ...] = ()
    """Partitions read here."""
    paused: bool = False
    """Nothing is read until the leader answers."""
    problem: str | None = None
    """Fault of the link to the leader; null if there is none."""


class ScaleOutStatus(Model):
    """Several daemons on one stream."""

    role: Literal["leader", "follower"]
    """Role of this daemon."""
    followers: tuple[FollowerStatus, ...] = ()
    """Leader: by name; the leader's own reader is among them."""
    refused: dict[str, int] = Field(default_factory=dict)
    """Leader: requests and deltas refused, by reason."""
    link: LeaderLinkStatus | None = None
    """Follower: its link to the leader."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of scale-out; those of the other role are empty or zero."""
        link = self.link or LeaderLinkStatus(leader="")
        silent = sum(follower.silent for follower in self.followers)
        states = {"pushing": len(self.followers) - silent, "silent": silent}
        yield gauges("flexd_followers", "Followers that the leader knows, by state.", "state", states)
        for name, text, values in (
            ("last_push_seconds", "Since the last push.", {f.name: f.last_push_seconds for f in self.followers}),
            ("partitions", "Partitions that it reads.", {f.name: len(f.partitions) for f in self.followers}),
            ("lag_messages", "Messages not read in its partitions.", {f.name: f.lag_messages for f in self.followers}),
        ):
            yield gauges(f"flexd_follower_{name}", text, "follower", values)
        for name, text, totals in (
            ("deltas", "Deltas counted.", {f.name: f.accepted for f in self.followers}),
            ("repeated_deltas", "Deltas that were counted already.", {f.name: f.repeated for f in self.followers}),
            ("bytes", "Bytes of its deltas.", {f.name: f.bytes for f in self.followers}),
            ("accesses", "Accesses of its deltas.", {f.name: f.accesses for f in self.followers}),
        ):
            yield counters(f"flexd_follower_{name}", text, "follower", totals)
        yield counters(
            "flexd_scale_out_refused", "Deltas and requests that the leader refused.", "reason", self.refused
        )
        pushed = {} if self.link is None else {"accepted": link.accepted, "repeated": link.repeated}
        yield counters("flexd_scale_out_pushed", "Deltas of this follower, by outcome.", "outcome", pushed)
        yield counters(
            "flexd_scale_out_push_failures", "Pushes without a final answer, by reason.", "reason", link.failures
        )
        yield counter("flexd_scale_out_sent_bytes", "Sent to the leader.", link.bytes)
        yield counter("flexd_scale_out_restarts", "Counts dropped and read again from the leader.", link.restarts)
        yield counter("flexd_scale_out_dropped_messages", "Messages read again for that.", link.dropped_messages)
        yield gauge(
            "flexd_scale_out_last_answer_seconds", "Since the leader's newest answer.", link.last_answer_seconds
        )


def leader_status(leader: Leader) -> ScaleOutStatus:
    """Return the followers of a leader."""
    followers = tuple(FollowerStatus.from_object(report) for report in leader.followers())
    return ScaleOutStatus(role="leader", followers=followers, refused=dict(leader.refused()))


def follower_status(leader: str, stats: object) -> ScaleOutStatus:
    """Return a follower's link to its leader.

    Args:
        leader: its address.
        stats: of the link, with the attributes of ``LeaderLinkStatus``.
    """
    return ScaleOutStatus(role="follower", link=LeaderLinkStatus.from_object(stats, leader=leader))
