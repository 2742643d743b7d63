"""Real processes that ingest and are killed and rebalanced: the counters end as if nothing had happened.

A full disk and a broker that does not answer for a while are faults of ``make chaos``.
"""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tansu_broker import TansuBroker

from flexd.core.keyspace import TableSpec
from flexd.sketch.ingestor import Ingestor
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import SketchSettings
from flexd.stream.codec import encode_arrow
from flexd.stream.kafka.bounded_fetcher import BatchLimits
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.types import AccessBatch
from tests.support.forked import Forked
from tests.support.reading import kafka_source, poll_until
from tests.support.saved_sketches import loaded_sketches, newest_snapshot
from tests.support.until import until

pytestmark = pytest.mark.slow

TABLES = [TableSpec("items", 5000, 4)]
SETTINGS = SketchSettings(memory_bytes=2**22, half_life_seconds=None, max_future_seconds=1e9, max_hot_rows=100)
LANES = 4
IDS = 64


def ingest(order: Mapping[str, Any]) -> None:
    """Ingest in the child until SIGTERM, and keep a status file of the counts."""
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    state = Path(order["state"])
    source = kafka_source(
        order["bootstrap"], order["topic"], order["group"], limits=BatchLimits(max_poll_messages=50),
        session_timeout_seconds=3.0,
    )  # fmt: skip
    ingestor = Ingestor(
        source, TABLES, SETTINGS, SnapshotStore(state, 3), poll_seconds=0.02, snapshot_interval_seconds=0.03
    )
    with (state.parent / "starts.jsonl").open("a") as file:
        file.write(
            json.dumps({"restored": ingestor._unrestored_positions, "problems": ingestor.restored.problems}) + "\n"
        )
    ingestor.start()
    status = state.parent / "status.json"
    while not stopped:
        messages, known = ingestor.counter.messages, ingestor.sketches.samples
        text = {"pid": os.getpid(), "samples": known, "messages": messages}
        temporary = status.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(text))
        temporary.rename(status)
        time.sleep(0.01)
    os._exit(0 if ingestor.stop(20.0) else 3)


def start(state: Path, **source: Any) -> Forked:
    """Start a process that ingests into ``state`` (any thread)."""
    return Forked(ingest, {"state": str(state), **source}, directory=state.parent, name="ingest")


def status_of(state: Path, process: Forked) -> dict[str, Any]:
    """Return the newest status of this process; empty before its first."""
    try:
        status: dict[str, Any] = json.loads((state.parent / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return status if status["pid"] == process.pid else {}


def wait_for_status(state: Path, process: Forked, condition: Any, seconds: float = 60.0) -> dict[str, Any]:
    def reached() -> dict[str, Any]:
        status = status_of(state, process)
        return status if status and condition(status) else {}

    return until(reached, seconds, lambda: status_of(state, process))


def end(process: Forked, number: int = signal.SIGTERM) -> None:
    os.kill(process.pid, number)
    process.wait(30.0)


def saved_counters(state: Path) -> tuple[Any, dict[str, int]]:
    """Return (counters of the newest snapshot, its positions)."""
    meta, arrays = newest_snapshot(state)
    return loaded_sketches(TABLES, SETTINGS, meta["sketches"], arrays), meta["positions"]


def counted(batches: Any) -> SketchSet:
    """Return the sketches that an uninterrupted run ends with."""
    sketches = SketchSet(TABLES, SETTINGS)
    for batch in batches:
        sketches.ingest(batch.table, batch.rows, batch.source_rank, batch.event_time_seconds)
    return sketches


def batch(number: int) -> AccessBatch:
    rows = np.random.default_rng(number).zipf(1.2, IDS) % TABLES[0].rows
    return AccessBatch("items", rows.astype(np.int32), number % 4, 1.7e9 + number)


class Producer:
    """Send messages from number ``first`` on until ``finish``; those below ``sent`` are in the broker afterwards."""

    def __init__(self, bootstrap: str, topic: str, messages_per_second: float, first: int = 0) -> None:
        self.sent = first
        self._sink = KafkaSink(bootstrap, topic)
        self._pause = 10 / messages_per_second
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.is_set():
            for _ in range(10):
                self._sink.send(encode_arrow([batch(self.sent)]))
                self.sent += 1
            self._done.wait(self._pause)

    def finish(self) -> int:
        self._done.set()
        self._thread.join(20.0)
        self._sink.flush(20.0)
        assert self._sink.messages_failed == 0
        self._sink.close()
        return self.sent


def assert_as_uninterrupted(state: Path, messages: int) -> None:
    """Bit-equal counters, and positions that name exactly the messages behind them."""
    got, positions = saved_counters(state)
    expected = counted(batch(number) for number in range(messages))
    assert got.samples == expected.samples == messages * IDS
    assert sum(positions.values()) == messages
    arrays, wanted = got.state()[1], expected.state()[1]
    for name in ("0/low", "0/high_rows", "0/high_carries"):
        assert np.array_equal(arrays[name], wanted[name]), name


def starts_of(state: Path) -> list[dict]:
    return [json.loads(line) for line in (state.parent / "starts.jsonl").read_text().splitlines()]


class Lane:
    """One ingesting process after another over one state directory, each killed; beside other lanes, because joining
    a group is mostly waiting."""

    def __init__(self, bootstrap: str, state: Path, number: int, lives: int) -> None:
        state.parent.mkdir()
        self.state = state
        self.counting = 0
        self.failure: BaseException | None = None
        self._bootstrap, self._number = bootstrap, number
        self._lives = lives
        self._chance = random.Random(number)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        # Each life has deadlines of its own, whose failure is kept.
        self._thread.join(40.0 * self._lives)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def start(self, life: int | str) -> Forked:
        # A group of its own: the broker would wait for the dead member of the last life.
        return start(self.state, bootstrap=self._bootstrap, topic="t", group=f"g{self._number}-{life}")

    def _saved_messages(self) -> int:
        """Return the messages behind the newest snapshot; 0 without one."""
        if not SnapshotStore(self.state, 1, read_only=True).paths():
            return 0
        return sum(newest_snapshot(self.state)[0]["positions"].values())

    def _run(self) -> None:
        try:
            for life in range(self._lives):
                saved = self._saved_messages()
                process = self.start(life)
                if life % 5:
                    # From here on the kill hits counting and saving, else anything from the start on.
                    wait_for_status(self.state, process, lambda status: status["messages"] > 0)
                    self.counting += 1
                    if life % 2:  # however slow the machine is, some snapshots have further messages
                        until(lambda saved=saved: self._saved_messages() > saved, 60.0)
                    time.sleep(self._chance.uniform(0.0, 0.15))
                else:
                    time.sleep(self._chance.uniform(0.0, 0.5))
                end(process, signal.SIGKILL)
        except BaseException as error:
            self.failure = error


@pytest.mark.parametrize("lives", [2, pytest.param(13, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_killed_many_times_while_a_broker_delivers(tmp_path, lives):
    with TansuBroker(topics={"t": 3}) as broker:
        producer = Producer(broker.bootstrap_servers, "t", 200)
        lanes = [Lane(broker.bootstrap_servers, tmp_path / f"{i}" / "state", i, lives) for i in range(LANES)]
        for lane in lanes:
            lane.wait()
        messages = producer.finish()
        for lane, process in zip(lanes, [lane.start("last") for lane in lanes], strict=True):
            wait_for_status(lane.state, process, lambda status: status["samples"] >= messages * IDS)
            end(process)
    for lane in lanes:
        assert lane.counting >= lives * 3 // 5
        starts = starts_of(lane.state)
        restored = [sum((start["restored"] or {}).values()) for start in starts]
        assert len(set(restored)) > lives // 3, "snapshots were made between the kills"
        assert restored == sorted(restored)
        assert not any(start["problems"] for start in starts)
        assert_as_uninterrupted(lane.state, messages)


@pytest.mark.long
def test_a_partition_taken_away_and_given_back(tmp_path):
    """A second member joins the group, takes partitions and reads them for itself, and leaves: three times."""
    state = tmp_path / "state"
    with TansuBroker(topics={"t": 2}) as broker:
        producer = Producer(broker.bootstrap_servers, "t", 300)
        order = {"bootstrap": broker.bootstrap_servers, "topic": "t", "group": "g"}
        process = start(state, **order)
        wait_for_status(state, process, lambda status: status["messages"] > 0)
        for turn in range(3):
            other = kafka_source(broker.bootstrap_servers, "t", "g", session_timeout_seconds=3.0)
            poll_until(other, len, 40)
            if turn == 1:
                end(process, signal.SIGKILL)
                process = start(state, **order)
            other.close()
        messages = producer.finish()
        wait_for_status(state, process, lambda status: status["samples"] >= messages * IDS)
        end(process)
    assert_as_uninterrupted(state, messages)
