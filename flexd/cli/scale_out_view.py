"""Text of a leader's followers, or of a follower's link."""

from __future__ import annotations

from flexd.api.scale_out import FollowerStatus, LeaderLinkStatus, ScaleOutStatus
from flexd.cli.blocks import Block, Facts, Table
from flexd.core import units

MAX_PARTITIONS_SHOWN = 6


def scale_out_block(status: ScaleOutStatus) -> Block:
    """Return the followers of a leader, or the link of a follower to its leader."""
    if status.link is not None:
        return Facts("scale-out", _link(status.link))
    rows = tuple(_follower(follower) for follower in status.followers) or (("none is here", "", "", "", "", "", ""),)
    return Table(
        "followers", ("follower", "partitions", "behind", "last push", "deltas", "refused", "sent"), rows,
        frozenset(("behind", "last push", "deltas", "refused", "sent")),
    )  # fmt: skip


def _follower(follower: FollowerStatus) -> tuple[str, ...]:
    return (
        follower.name,
        _partitions(follower.partitions),
        units.count(follower.lag_messages),
        units.age(follower.last_push_seconds) + (" SILENT" if follower.silent else ""),
        units.count(follower.accepted),
        ", ".join(f"{reason} {units.count(number)}" for reason, number in follower.refused.items()) or "0",
        units.size(follower.bytes),
    )


def _link(link: LeaderLinkStatus) -> tuple[tuple[str, str], ...]:
    facts = [
        ("leader", f"{link.leader}, answered {units.age(link.last_answer_seconds)} ago"),
        ("reads", _partitions(link.partitions) + (" (PAUSED: the leader does not answer)" if link.paused else "")),
        (
            "deltas",
            f"{units.count(link.accepted)} counted, {units.count(link.repeated)} repeated, "
            f"{units.size(link.bytes)} sent",
        ),
        ("read again", f"{units.count(link.dropped_messages)} messages in {units.count(link.restarts)} restarts"),
    ]
    if link.problem:
        facts.append(("problem", link.problem))
    return tuple(facts)


def _partitions(names: tuple[str, ...]) -> str:
    if len(names) > MAX_PARTITIONS_SHOWN:
        return f"{', '.join(names[:MAX_PARTITIONS_SHOWN])} and {len(names) - MAX_PARTITIONS_SHOWN} more"
    return ", ".join(names) or "none"
