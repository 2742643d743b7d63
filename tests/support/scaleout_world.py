"""A consumer group of followers and a leader without processes, threads or sockets: every step is the caller's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flexd.core.errors import CodecError, ScaleOutError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.ingest import Ingestor
from flexd.ingest.message_counts import MessageCounts
from flexd.scaleout.count_delta import CountDelta, OffsetRange
from flexd.scaleout.follower import Follower, FollowerOptions
from flexd.scaleout.follower_registry import FollowerRegistry
from flexd.scaleout.leader import Leader
from flexd.scaleout.ledger import Ledger
from flexd.scaleout.push_answer import PushAnswer
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings
from flexd.stream.losses import Losses
from flexd.stream.types import AccessBatch, Message

ROWS = 64
TABLES = [TableSpec("item", ROWS, 4)]
KEYSPACE = KeySpace(TABLES)
SETTINGS = SketchSettings(memory_bytes=2**21, half_life_seconds=None, max_future_seconds=1e12, max_hot_rows=16)
BAD = b"bad"


def payload(row: int, times: int, rank: int = 0, step: int | None = None) -> bytes:
    return b"%d %d" % (row, times) if step is None else b"%d %d %d %d" % (row, times, rank, step)


def decode(data: bytes | memoryview, max_bytes: int) -> list[AccessBatch]:
    if data == BAD:
        raise CodecError("no", reason="bad_json")
    row, times, *place = (int(text) for text in bytes(data).split())
    rank, step = place or (0, None)
    return [AccessBatch("item", np.full(times, row, dtype=np.int64), rank, 100.0, step=step)]


def count_delta_of(
    rows: list[int], ranges: dict[str, OffsetRange], sketches: SketchSet | None = None, **more
) -> CountDelta:
    made = SketchSet.of(KEYSPACE.tables, SETTINGS) if sketches is None else sketches
    counts = made.ingest("item", np.array(rows, dtype=np.int64), 0, 5.0)
    meta, arrays = made.state()
    delta = CountDelta(
        "one", "s", 1, "job", KEYSPACE.digest, ranges, MessageCounts(1, 8, 1, counts), 0,
        tuple(ranges), False, meta, arrays,
    )  # fmt: skip
    return dataclasses.replace(delta, **more)


class MemoryStore:
    """Snapshots in memory."""

    def __init__(self) -> None:
        self.saved: tuple[dict[str, Any], dict[str, Any]] | None = None

    def save(self, meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        self.saved = copy.deepcopy((dict(meta), dict(arrays)))

    def paths(self) -> list[Path]:
        return [] if self.saved is None else [Path("memory")]

    def read(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        assert self.saved is not None
        return copy.deepcopy(self.saved)


class LeaderProcess:
    def __init__(self, store: MemoryStore, job: str = "job") -> None:
        followers = FollowerRegistry(10.0)
        self.ledger = Ledger(followers)
        self.leader = Leader(job, KEYSPACE, SETTINGS, self.ledger, followers)
        self.ingestor = Ingestor(self.ledger, TABLES, SETTINGS, store, save_in_background=False)
        self.leader.serve(self.ingestor)

    def open(self) -> None:
        """Start as the ingest thread does."""
        self.ingestor._restore_positions()
        self.ledger.poll(0.0)

    def save(self) -> None:
        self.ingestor._begin_save()
        self.ingestor._finish_save()

    def totals(self) -> list[int]:
        return [round(weight) for weight in self.ingestor.query("item", np.arange(ROWS))]


class Network:
    """A sender whose attempts are made by the test; ``up`` delivers the outstanding responses."""

    def __init__(self, offer: Callable[[bytes], PushAnswer]) -> None:
        self.offer = offer
        self.up = True
        self.data: bytes | None = None
        self.answer: PushAnswer | None = None
        self.history: list[bytes] = []
        self.problem: str | None = None
        self.failures: dict[str, int] = {}
        self.bytes_sent = 0
        self.answered_at: float | None = None

    def send(self, make: Callable[[], bytes]) -> None:
        assert self.data is None
        assert self.answer is None
        self.data = make()
        self.history = [*self.history[-7:], self.data]

    def retry_now(self) -> None:
        pass

    def poll_answer(self, timeout_seconds: float = 0.0) -> PushAnswer | None:
        if timeout_seconds > 0 and self.up:
            self.attempt()
        answer, self.answer = self.answer, None
        return answer

    def attempt(self, *, lose_answer: bool = False) -> None:
        if self.data is None:
            return
        try:
            answer = self.offer(self.data)
        except ScaleOutError:
            return
        if not lose_answer:
            self.answer, self.data = answer, None


class GroupSource:
    """Like ``KafkaSource``: a group assigns partitions, ``position_of`` positions; revocations are announced."""

    problem: str | None = None

    def __init__(self, log: Mapping[str, list[bytes]], follower: Follower, per_poll: int = 4) -> None:
        self.log, self.follower, self.per_poll = log, follower, per_poll
        self.lost = Losses()
        self.assigned: set[str] = set()
        self.unanswered: set[str] = set()
        self.next: dict[str, int] = {}
        self.committed: dict[str, int] = {}

    def rebalance(self, partitions: set[str], *, lost: bool = False) -> None:
        leaving = sorted(self.assigned)
        if lost:
            self.follower.on_lost(leaving)
        elif leaving:
            with contextlib.suppress(ScaleOutError):
                self.follower.on_revoked(leaving)
        self.assigned, self.unanswered = set(partitions), set(partitions)

    def losses(self) -> Losses:
        return self.lost

    def poll(self, timeout_seconds: float) -> list[Message]:
        if self.unanswered:
            try:
                places = self.follower.position_of(sorted(self.unanswered))
            except ScaleOutError:
                pass
            else:
                self.next.update(places)
                self.unanswered.clear()
        found: list[Message] = []
        for name in sorted(self.assigned - self.unanswered):
            at = self.next.get(name, 0)
            taken = self.log[name][at : at + self.per_poll - len(found)]
            found += [Message(name, at + i, data) for i, data in enumerate(taken)]
            if taken:
                self.next[name] = at + len(taken)
        return found

    def restore(self, positions: Mapping[str, int]) -> None:
        self.next = dict(positions)

    def positions(self) -> dict[str, int]:
        return dict(self.next)

    def lag(self) -> int:
        return sum(len(self.log[name]) - self.next.get(name, 0) for name in self.assigned)

    def commit(self, positions: Mapping[str, int]) -> str | None:
        self.committed = dict(positions)
        return None

    def close(self) -> None:
        self.follower.on_revoked(sorted(self.assigned))


class FollowerProcess:
    def __init__(
        self, name: str, log: Mapping[str, list[bytes]], offer: Callable[[bytes], PushAnswer], **more: Any
    ) -> None:
        self.now = 0.0
        self.network = Network(offer)
        options = FollowerOptions(
            name, "s1", "job", KEYSPACE.digest, **{"push_interval_seconds": 1.0, "settle_seconds": 0.01, **more}
        )
        made: list[GroupSource] = []

        def make(follower: Follower) -> GroupSource:
            made.append(GroupSource(log, follower))
            return made[0]

        self.follower = Follower(options, make, self.network, grouped=True, clock=lambda: self.now)
        self.source = made[0]
        self.ingestor = Ingestor(self.follower, TABLES, SETTINGS, None, decode=decode, poll_seconds=0.0)
        self.follower.attach(self.ingestor)

    def losses(self) -> Losses:
        return self.lost

    def poll(self, passed_seconds: float = 0.5) -> None:
        self.now += passed_seconds
        self.ingestor._read_some()

    def stop(self) -> None:
        self.follower.close()


class World:
    """``check`` holds after every step: the leader has counted exactly what lies below its positions."""

    def __init__(self, partitions: int, followers: int) -> None:
        self.log: dict[str, list[bytes]] = {f"p{i}": [] for i in range(partitions)}
        self.store = MemoryStore()
        self.leader: LeaderProcess | None = LeaderProcess(self.store)
        self.leader.open()
        self.followers = {f"f{i}": self._start(f"f{i}") for i in range(followers)}
        self.assign(0)
        for _ in range(2):
            self.drive()

    def drive(self, seconds: float = 2.0) -> None:
        """Let every follower read, push if the network is up, and receive the response."""
        for follower in self.followers.values():
            follower.poll(seconds)
            if follower.network.up:
                follower.network.attempt()
            follower.poll(0.0)

    def _start(self, name: str) -> FollowerProcess:
        return FollowerProcess(name, self.log, self._offer)

    def _offer(self, data: bytes) -> PushAnswer:
        if self.leader is None:
            raise ScaleOutError("away", reason="unreachable")
        return self.leader.leader.offer(data)

    def assign(self, shift: int, *, lost: str | None = None) -> None:
        names = sorted(self.followers)
        share: dict[str, set[str]] = {name: set() for name in names}
        if names:
            for number, partition in enumerate(sorted(self.log)):
                share[names[(number + shift) % len(names)]].add(partition)
        for name, partitions in share.items():
            self.followers[name].source.rebalance(partitions, lost=name == lost)

    def kill(self, name: str) -> None:
        del self.followers[name]
        self.assign(0)

    def join(self, name: str) -> None:
        self.followers[name] = self._start(name)
        self.assign(1)

    def crash_leader(self) -> None:
        self.leader = None

    def start_leader(self) -> None:
        self.leader = LeaderProcess(self.store)
        self.leader.open()

    def produced(self, positions: Mapping[str, int] | None = None) -> list[int]:
        counts: Counter[int] = Counter()
        for name, messages in self.log.items():
            end = len(messages) if positions is None else positions.get(name, 0)
            for data in messages[:end]:
                if data != BAD:
                    row, times = (int(text) for text in data.split()[:2])
                    counts[row] += times
        return [counts[row] for row in range(ROWS)]

    def check(self) -> None:
        if self.leader is None:
            return
        positions = self.leader.ledger.positions()
        assert self.leader.totals() == self.produced(positions)
        stats = self.leader.ingestor._read_stats()
        assert stats.accesses <= sum(self.produced()), "followers' figures are not added twice"

    def finish(self) -> None:
        """Everything is up again, for as long as it takes: all is counted."""
        if self.leader is None:
            self.start_leader()
        if not self.followers:
            self.join("last")
        for _ in range(60 + sum(len(messages) for messages in self.log.values())):
            for follower in self.followers.values():
                follower.network.up = True
                follower.network.attempt()
                follower.poll(2.0)
            assert self.leader is not None
            ends = {name: len(messages) for name, messages in self.log.items() if messages}
            if self.leader.ledger.positions() == ends:
                break
        self.check()
        assert self.leader.ledger.positions() == ends, (self.leader.ledger.positions(), ends)
        assert self.leader.totals() == self.produced()
