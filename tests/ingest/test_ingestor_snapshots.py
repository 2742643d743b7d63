"""Snapshots of the ingestor: counters and positions agree, are written in the background, and damage is detected."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from flexd.ingest import Ingestor
from flexd.ingest import ingestor as ingestor_module
from flexd.sketch import snapshot
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.types import SketchSettings
from flexd.stream.codecs.codec import decode, encode_arrow
from flexd.stream.types import AccessBatch
from tests.support.ingest_fakes import DEADLINE, SETTINGS, T0, TABLES, FakeSource, wait_until

UNDECAYED = dataclasses.replace(SETTINGS, half_life_seconds=None, memory_bytes=6_000_000, logarithmic=False)


def _log(partitions: int, messages: int) -> dict[str, list[bytes]]:
    def message(i: int) -> bytes:
        random = np.random.default_rng(i)
        lengths = np.array([300, 100], dtype=np.int32)
        return encode_arrow(
            [AccessBatch(t.name, random.zipf(1.3, 400) % (t.rows + 3) - 1, i % 4, T0 + i, lengths) for t in TABLES]
        )

    return {f"p{p}": [message(p * 1000 + i) for i in range(messages)] for p in range(partitions)}


def test_positions_of_a_snapshot_are_those_of_its_counters(tmp_path):
    source = FakeSource(_log(4, 6), per_poll=4)
    store = SnapshotStore(tmp_path, 50)
    ingestor = Ingestor(
        source, TABLES, UNDECAYED, store, poll_seconds=0.01, snapshot_interval_seconds=0.0, save_in_background=False
    )
    ingestor.start()
    wait_until(lambda: source.lag() == 0)
    assert ingestor.stop(DEADLINE)
    seen = set()
    for path in store.paths():
        meta, _ = snapshot.read(path)
        accesses = sum(entry["samples"] for entry in meta["sketches"]["sketches"])
        messages = sum(meta["positions"].values())
        seen.add(messages)
        assert accesses == sum(
            _accepted(source.log[p][i]) for p, end in meta["positions"].items() for i in range(end)
        ), f"{messages} messages"
    assert len(seen) > 3


def _accepted(message: bytes) -> int:
    sketches = SketchSet(TABLES, SketchSettings(2**24, None))
    return sum(sketches.ingest(b.table, b.rows, 0, b.event_time_seconds).accepted for b in decode(message, 2**20))


def test_ingest_continues_while_a_snapshot_is_written_and_positions_are_those_of_the_copy(tmp_path):
    written = threading.Event()

    class SlowStore(SnapshotStore):
        def save(self, meta, arrays):
            written.wait(DEADLINE)
            return super().save(meta, arrays)

    source = FakeSource({"p": _log(1, 60)["p0"]}, per_poll=2)
    gate = threading.Event()
    source.at = lambda step: gate.wait(DEADLINE) if step == "poll" and source.next["p"] >= 20 else None
    store = SlowStore(tmp_path, 5)
    ingestor = Ingestor(source, TABLES, UNDECAYED, store, poll_seconds=0.01, snapshot_interval_seconds=3600.0)
    ingestor.request_snapshot()
    ingestor.start()
    wait_until(lambda: source.next["p"] >= 20)
    assert source.committed == [], "nothing is committed before it is durable"
    written.set()
    gate.set()
    wait_until(lambda: source.lag() == 0 and source.committed)
    assert source.committed[0]["p"] < 20
    assert ingestor.stop(DEADLINE)
    assert source.committed[-1] == {"p": 60}


def test_an_idle_stream_decays_in_reads_and_not_in_the_counters(tmp_path, monkeypatch):
    monkeypatch.setattr(ingestor_module, "IDLE_AFTER_SECONDS", 0.05)
    settings = dataclasses.replace(SETTINGS, half_life_seconds=0.2)
    batch = AccessBatch("small", np.array([3], dtype=np.int32), 0, T0)
    source = FakeSource({"p": [encode_arrow([batch])]})
    ingestor = Ingestor(source, TABLES, settings, SnapshotStore(tmp_path, 1), poll_seconds=0.01)
    ingestor.start()
    wait_until(lambda: ingestor.table_profile("small").weight > 0)
    wait_until(lambda: ingestor.stats().idle_seconds > 0.4)
    assert 0 < ingestor.table_profile("small").weight < 0.3
    assert ingestor.profile().tables[0].weight < 0.3
    source.problem = "broker away"
    assert ingestor.table_profile("small").weight == 1.0, "an outage is not idleness"
    source.problem = None
    assert ingestor.stop(DEADLINE)
