"""Request the leader's tables: deltas without counts, which the leader refuses with its tables."""

from __future__ import annotations

from flexd.core.keyspace import TableSpec
from flexd.core.supervision import Supervisor
from flexd.ingest.message_counts import MessageCounts
from flexd.scaleout import count_delta
from flexd.scaleout.count_delta import NO_TABLES, CountDelta
from flexd.scaleout.delta_sender import DeltaSender, Link
from flexd.scaleout.follower import FollowerStats
from flexd.scaleout.push_answer import PushAnswer


class TablesRequest:
    """Repeats the request until it is stopped, at least every few seconds; each attempt has a deadline.

    Args:
        link: connection to the leader; owned from now on.
        name: name of the follower.
        session: identifier of its process.
        job: name of the job.
        supervisor: of the process.
    """

    def __init__(self, link: Link, name: str, session: str, job: str, supervisor: Supervisor) -> None:
        self._sender = DeltaSender(link, supervisor)
        self._delta = CountDelta(name, session, 1, job, NO_TABLES, {}, MessageCounts(), 0, (), False, {}, {})

    def start(self) -> None:
        self._sender.start()
        self._sender.send(lambda: count_delta.encode(self._delta))

    def stop(self, timeout_seconds: float) -> bool:
        """Return True if the thread ended within the deadline."""
        return self._sender.stop(timeout_seconds)

    def leader_tables(self) -> tuple[TableSpec, ...]:
        """Return the tables of the leader; none while it has sent none."""
        return tables_of_refusal(self._sender.refusal)

    def missing(self) -> str:
        """Return why there are no tables yet, in words."""
        refusal = self._sender.refusal
        if refusal is not None and refusal.reason == "other_tables" and not refusal.tables:
            return (
                "the leader's flexd is older and does not send its tables: list them under `tables`, as the leader has "
                "them, or upgrade the leader"
            )
        return self._sender.problem or "the leader has not answered yet"

    def stats(self) -> FollowerStats:
        """Return the state of the link: nothing is read."""
        sender = self._sender
        return FollowerStats(
            failures=dict(sender.failures), bytes=sender.bytes_sent, paused=True, problem=sender.problem
        )


def tables_of_refusal(refusal: PushAnswer | None) -> tuple[TableSpec, ...]:
    """Return the leader's tables of a refusal for other tables; none of any other."""
    return refusal.tables if refusal is not None and refusal.reason == "other_tables" else ()
