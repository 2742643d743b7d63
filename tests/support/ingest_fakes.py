"""Fake sources, messages and an ingestor for the tests of ``flexd.sketch.ingestor``."""

import functools
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from flexd.core import supervision as faults
from flexd.core.keyspace import TableSpec
from flexd.sketch.ingestor import Ingestor
from flexd.sketch.table_sketch import SketchSettings
from flexd.stream.codec import encode_arrow
from flexd.stream.types import AccessBatch, Losses, StreamMessage

TABLES = [TableSpec("small", 200, 4), TableSpec("large", 400_000, 4)]
SETTINGS = SketchSettings(memory_bytes=1_000_000, half_life_seconds=40.0, max_future_seconds=1e9, max_hot_rows=100)
T0 = 1.7e9
DEADLINE = 20.0


class Killed(BaseException):
    """Simulates the death of the process; derived from BaseException so that no handler catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, point: str, passage: int) -> None:
    """Raise ``Killed`` at a passage of a fault point, once."""
    monkeypatch.setattr(faults, "InjectedFaultError", Killed)
    monkeypatch.setattr(faults, "_armed", {})
    monkeypatch.setattr(faults, "_passed", {})
    faults.arm({faults.VARIABLE: f"{point}:{passage}:raise"})


class FakeSource:
    """Partitions of prepared messages. ``on_poll`` is called by every poll, and may raise."""

    def __init__(self, log: Mapping[str, list[bytes]], per_poll: int = 3):
        self.log = log
        self.on_poll: Callable[[], object] = lambda: None
        self.per_poll = per_poll
        self.next = dict.fromkeys(log, 0)
        self.restored: dict[str, int] | None = None
        self.committed: list[dict[str, int]] = []
        self.commit_failure: str | None = None
        self.problem: str | None = None
        self.lost = Losses()
        self.read_share = 1.0
        self.missing_partitions: dict[str, float] = {}
        self.closed = False
        self.drained = threading.Event()

    def losses(self) -> Losses:
        return self.lost

    def poll(self, timeout_seconds: float) -> list[StreamMessage]:
        self.on_poll()
        taken = []
        for partition in sorted(self.log, key=lambda p: self.next[p] / max(1, len(self.log[p]))):
            while len(taken) < self.per_poll and self.next[partition] < len(self.log[partition]):
                offset = self.next[partition]
                taken.append(StreamMessage(partition, offset, self.log[partition][offset]))
                self.next[partition] += 1
        if not taken:
            self.drained.set()
            time.sleep(0.001)
        return taken

    def restore(self, positions: Mapping[str, int]) -> None:
        self.restored = dict(positions)
        self.next.update(positions)

    def positions(self) -> dict[str, int]:
        return dict(self.next)

    def lag(self) -> int:
        return sum(len(self.log[p]) - self.next[p] for p in self.log)

    def commit(self, positions: Mapping[str, int]) -> str | None:
        self.committed.append(dict(positions))
        return self.commit_failure

    def close(self) -> None:
        self.closed = True


def make_message(i: int) -> bytes:
    random = np.random.default_rng(i)
    batches = [
        AccessBatch(
            table.name, (random.zipf(1.3, 400) % (table.rows + 9)).astype(np.int64) - 4, i % 4, T0 + 7.0 * i + j, None
        )
        for j, table in enumerate(TABLES)
    ]
    return encode_arrow(batches)


LOG = {"p0": [make_message(i) for i in range(0, 24, 2)], "p1": [make_message(i) for i in range(1, 24, 2)]}
LOG["p1"][4] = b"garbage"


def make_ingestor(source, store, tables=TABLES, settings=SETTINGS, **more) -> Ingestor:
    """Return an ingestor that writes its snapshots in its own thread."""
    more.setdefault("snapshot_interval_seconds", 3600.0)
    ingestor = Ingestor(source, tables, settings, store, poll_seconds=0.01, **more)
    ingestor.snapshots.background = False
    return ingestor


def state_of(ingestor: Ingestor) -> tuple[dict, dict[str, np.ndarray]]:
    return ingestor.sketches.state()


def run_to_the_end(ingestor: Ingestor, source: FakeSource) -> None:
    """Run the loop in this thread, so that ``Killed`` reaches the caller."""

    def stop_when_drained() -> None:
        if source.lag() == 0:
            ingestor._stop.set()

    source.on_poll = stop_when_drained
    ingestor._loop()
    ingestor._finish()


@functools.cache
def uninterrupted_state() -> tuple[dict, dict[str, np.ndarray]]:
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, None)
    run_to_the_end(ingestor, source)
    return state_of(ingestor)


def assert_same_state(got, expected) -> None:
    assert got[0] == expected[0]
    assert got[1].keys() == expected[1].keys()
    for name, array in expected[1].items():
        assert np.array_equal(got[1][name], array), name
