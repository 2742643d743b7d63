"""Leader and followers, as the admin API tells it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model


class FollowerStatus(Model):
    """One follower, as its leader knows it."""

    name: str
    """Of the follower."""
    partitions: tuple[str, ...] = ()
    """That it reads."""
    lag_messages: int = 0
    """That it has not read in them, as of its last push."""
    last_push_seconds: FiniteOrNone = None
    """Since its last push."""
    silent: bool = False
    """Whether that is longer than ``scale_out.silent_after_seconds``."""
    accepted: int = 0
    """Deltas counted since the leader started."""
    repeated: int = 0
    """Deltas that were counted already (an answer was lost)."""
    refused: dict[str, int] = Field(default_factory=dict)
    """Deltas refused, by reason."""
    bytes: int = 0
    """Of all its deltas."""
    accesses: int = 0
    """Of its deltas that were counted."""


class LeaderLinkStatus(Model):
    """A follower's way to its leader."""

    leader: str
    """Address."""
    accepted: int = 0
    """Deltas that the leader counted."""
    repeated: int = 0
    """Deltas that it had counted already."""
    restarts: int = 0
    """Times that counts were dropped and the stream read again from the leader's positions."""
    dropped_messages: int = 0
    """Messages read again because of that."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Attempts that brought no final answer, by reason."""
    bytes: int = 0
    """Sent."""
    last_answer_seconds: FiniteOrNone = None
    """Since the newest answer."""
    partitions: tuple[str, ...] = ()
    """Read here."""
    paused: bool = False
    """Nothing is read until the leader answers."""
    problem: str | None = None
    """What is wrong with the way to the leader."""


class ScaleOutStatus(Model):
    """Several daemons on one stream."""

    role: Literal["leader", "follower"]
    """Of this daemon."""
    followers: tuple[FollowerStatus, ...] = ()
    """Leader: by name; the leader's own reader is among them."""
    refused: dict[str, int] = Field(default_factory=dict)
    """Leader: requests and deltas refused, by reason."""
    link: LeaderLinkStatus | None = None
    """Follower: its way to the leader."""
