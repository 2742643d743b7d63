"""The leader: checks count deltas and adds them to its counters; and a leader that has no tables yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from flexd.core.errors import ScaleOutError, SketchError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.ingest import Ingestor
from flexd.scaleout import count_delta
from flexd.scaleout.count_delta import NO_TABLES, CountDelta
from flexd.scaleout.follower_registry import FollowerRegistry
from flexd.scaleout.ledger import Ledger
from flexd.scaleout.push_answer import PushAnswer
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings

_UNPACKED_SLACK_BYTES = 64 * 2**20


class DeltaReceiver(Protocol):
    """The receiver of the count deltas of a listener."""

    followers: FollowerRegistry
    max_unpacked_bytes: int

    def offer(self, data: bytes) -> PushAnswer:
        """Process one encoded delta. Raises ScaleOutError if there is no answer."""
        ...


class LeaderWithoutTables:
    """Refuse every delta as ``starting`` while the leader waits for the tables of the ranks.

    Args:
        settings: settings of the sketches.
        reason: returns what is missing, in words; called from any thread.
    """

    def __init__(self, settings: SketchSettings, reason: Callable[[], str]) -> None:
        self.followers = FollowerRegistry(float("inf"))
        self.max_unpacked_bytes = _max_unpacked_bytes(settings)
        self._reason = reason

    def offer(self, data: bytes) -> PushAnswer:
        """Raises ScaleOutError (``starting``)."""
        self.followers.count_refusal("starting")
        raise ScaleOutError(f"the leader: {self._reason()}", reason="starting", remedy="it is retried")


class Leader:
    """Accept deltas from any thread; merge one at a time.

    Args:
        ledger: positions of the counted messages.
        settings: settings of the sketches; followers must have equal ones.
        followers: record of the followers and of refusals.
    """

    def __init__(
        self,
        job: str,
        keyspace: KeySpace,
        settings: SketchSettings,
        ledger: Ledger,
        followers: FollowerRegistry,
    ) -> None:
        self._job = job
        self._keyspace = keyspace
        self._settings = settings
        self._ledger = ledger
        self.followers = followers
        self._merging = threading.Lock()
        self._ingestor: Ingestor | None = None
        self.max_unpacked_bytes = _max_unpacked_bytes(settings)

    def serve(self, ingestor: Ingestor) -> None:
        """Accept deltas from now on, into the counters of this ingest."""
        self._ingestor = ingestor

    def offer(self, data: bytes) -> PushAnswer:
        """Check and merge one encoded delta; see ``PushAnswer``.

        Raises:
            ScaleOutError: ``malformed``, ``format``, ``too_large``, ``starting``, ``too_many_followers``: nothing was
                counted and the answer has no positions.
        """
        try:
            delta = count_delta.decode(data, self.max_unpacked_bytes)
            answer = self._judge(delta)
            self.followers.record(delta, len(data), answer)
        except ScaleOutError as error:
            self.followers.count_refusal(error.reason)
            raise
        return answer

    def _judge(self, delta: CountDelta) -> PushAnswer:
        ingestor = self._ingestor
        if ingestor is None or not self._ledger.open:
            raise ScaleOutError("the leader is starting or stopping", reason="starting", remedy="it is retried")
        if delta.job != self._job:
            return self._refusal(ingestor, "other_job", f"job {delta.job!r}, the leader's is {self._job!r}")
        if delta.tables != self._keyspace.digest:
            text = (
                "it has no tables yet, and continues with the leader's"
                if delta.tables == NO_TABLES
                else "the tables are not the leader's: give both the same `tables` in the same order, or leave "
                "`tables` out of the follower's configuration"
            )
            return self._refusal(ingestor, "other_tables", text, self._keyspace.tables)
        if not delta.ranges:
            return self._answer(ingestor, "accepted")
        with self._merging:
            fit = self._ledger.judge(delta.ranges)
            if fit == "repeated":
                return self._answer(ingestor, "repeated")
            if fit == "elsewhere":
                return self._refusal(ingestor, "position", "it does not begin at the leader's positions")
            try:
                sketches = SketchSet.from_state(self._keyspace.tables, self._settings, delta.sketch_meta, delta.arrays)
                ingestor.merge(sketches, delta.messages, lambda: self._ledger.advance(delta.ranges))
            except SketchError as error:
                text = f"{error.message}: give both daemons the same `sketch` section"
                return self._refusal(ingestor, "other_sketches", text)
        return self._answer(ingestor, "accepted")

    def _answer(self, ingestor: Ingestor, outcome: str) -> PushAnswer:
        return PushAnswer(
            "repeated" if outcome == "repeated" else "accepted",
            self._ledger.positions(), self._ledger.durable(), ingestor.clock(),
        )  # fmt: skip

    def _refusal(self, ingestor: Ingestor, reason: str, message: str, tables: tuple[TableSpec, ...] = ()) -> PushAnswer:
        return PushAnswer(
            "refused", self._ledger.positions(), self._ledger.durable(), ingestor.clock(), reason, message, tables
        )


def _max_unpacked_bytes(settings: SketchSettings) -> int:
    return 2 * settings.memory_bytes + _UNPACKED_SLACK_BYTES
