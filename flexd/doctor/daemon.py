"""Checks of the running daemon: version, health, problems, differences from the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import flexd
from flexd.api.status import DaemonStatus
from flexd.core import units
from flexd.doctor.finding import Finding, fault, ok, warning

MOST_NAMED = 8


def daemon(status: DaemonStatus, differing_keys: Sequence[str]) -> Iterator[Finding]:
    """Yield findings about a daemon that runs.

    Args:
        differing_keys: configuration keys whose value differs from the file.
    """
    if status.version != flexd.__version__:
        yield warning(
            "daemon",
            f"the daemon is flexd {status.version}, this command is {flexd.__version__}",
            "use the same version for both",
        )
    if not status.healthy:
        yield fault("daemon", "not healthy: " + "; ".join(status.reasons), "see its log; restart it")
    elif status.paused:
        yield warning("daemon", f"paused: {status.pause_reason or 'no reason given'}", "flexd resume")
    elif not status.ready:
        yield warning("daemon", "not ready: " + "; ".join(status.reasons), "the reasons above name what is missing")
    else:
        yield ok("daemon", f"flexd {status.version} is ready, job {status.job}")
    for what, problem in (
        ("stream", status.stream.problem),
        ("ranks", status.topology.problem),
        ("snapshot", status.snapshot.problem),
    ):
        if problem and problem not in "; ".join(status.reasons):
            yield fault(what, problem, "see the daemon's log")
    channel = status.topology.channel
    if channel.refused_connections.get("version"):
        yield fault(
            "control port",
            f"{channel.refused_connections['version']} connections of trainers of another version were refused",
            "docs/upgrading.md says which versions work together",
        )
    elif (refusals := channel.refusals()) and not channel.connections:
        yield fault(
            "control port",
            f"connections arrive and none proves itself: {refusals}",
            "docs/runbook.md, FlexdNoneProvesItself: the secret or the certificates differ",
        )
    if lost := status.stream.losses():
        yield warning(
            "stream",
            f"lost before they were counted: {lost}",
            "raise the retention of the topic; docs/runbook.md, FlexdMessagesLost",
        )
    if status.threads.ending:
        yield fault("threads", f"the daemon is ending: {status.threads.ending}", "start it again; see its log")
    if differing_keys:
        yield warning(
            "running configuration",
            f"{units.plural(len(differing_keys), 'key')} not as in the file: {', '.join(differing_keys[:MOST_NAMED])}",
            "flexd reload, or restart the daemon",
        )
    else:
        yield ok("running configuration", "equals the file")
