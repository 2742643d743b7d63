"""What leader and followers tell of themselves: for the status and for Prometheus."""

from __future__ import annotations

from flexd.api.scale_out import FollowerStatus, LeaderLinkStatus, ScaleOutStatus
from flexd.daemon.label_values import SCALE_OUT_REFUSALS, with_zeros
from flexd.daemon.scale_out import LeaderUnit
from flexd.scaleout.delta_sender import FAILURE_REASONS
from flexd.scaleout.follower import FollowerStats
from flexd.server import figures as f


def leader_status(unit: LeaderUnit) -> ScaleOutStatus:
    followers = tuple(
        FollowerStatus(
            name=report.name,
            partitions=report.partitions,
            lag_messages=report.lag_messages,
            last_push_seconds=report.last_push_seconds,
            silent=report.silent,
            accepted=report.accepted,
            repeated=report.repeated,
            refused=dict(report.refused),
            bytes=report.bytes,
            accesses=report.accesses,
        )
        for report in unit.followers()
    )
    return ScaleOutStatus(role="leader", followers=followers, refused=unit.refused())


def leader_figures(unit: LeaderUnit) -> f.ScaleOutFigures:
    followers = {
        report.name: f.FollowerFigures(
            report.last_push_seconds, report.silent, len(report.partitions), report.lag_messages, report.accepted,
            report.repeated, report.bytes, report.accesses,
        )
        for report in unit.followers()
    }  # fmt: skip
    return f.ScaleOutFigures(followers=followers, refused=with_zeros(SCALE_OUT_REFUSALS, unit.refused()))


def follower_status(leader: str, stats: FollowerStats) -> ScaleOutStatus:
    link = LeaderLinkStatus(
        leader=leader,
        accepted=stats.accepted,
        repeated=stats.repeated,
        restarts=stats.restarts,
        dropped_messages=stats.dropped_messages,
        failures=dict(stats.failures),
        bytes=stats.bytes,
        last_answer_seconds=stats.last_answer_seconds,
        partitions=stats.partitions,
        paused=stats.paused,
        problem=stats.problem,
    )
    return ScaleOutStatus(role="follower", link=link)


def follower_figures(stats: FollowerStats) -> f.ScaleOutFigures:
    return f.ScaleOutFigures(
        pushed={"accepted": stats.accepted, "repeated": stats.repeated},
        failures=with_zeros(FAILURE_REASONS, stats.failures),
        restarts=stats.restarts,
        dropped_messages=stats.dropped_messages,
        sent_bytes=stats.bytes,
        last_answer_seconds=stats.last_answer_seconds,
    )
