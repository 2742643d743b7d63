"""Ingest on several threads: one state whatever their number, nothing half counted in a snapshot, idle decay."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from flexd.core.errors import SketchError
from flexd.ingest import Ingestor, loop
from flexd.ingest.dead_letters import DeadLetterFile
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_set import SketchSet
from flexd.stream.codecs.codec import decode, encode_arrow
from flexd.stream.types import AccessBatch
from tests.test_ingest import DEADLINE, LOG, SETTINGS, T0, TABLES, FakeSource, _ingestor, _wait

UNDECAYED = dataclasses.replace(SETTINGS, half_life_seconds=None, memory_bytes=6_000_000, logarithmic=False)


def _log(partitions: int, messages: int) -> dict[str, list[bytes]]:
    def message(i: int) -> bytes:
        random = np.random.default_rng(i)
        lengths = np.array([300, 100], dtype=np.int32)
        return encode_arrow(
            [AccessBatch(t.name, random.zipf(1.3, 400) % (t.rows + 3) - 1, i % 4, T0 + i, lengths) for t in TABLES]
        )

    return {f"p{p}": [message(p * 1000 + i) for i in range(messages)] for p in range(partitions)}


def _run(log, store, threads: int, settings=UNDECAYED, **more) -> Ingestor:
    source = FakeSource(log, per_poll=7)
    ingestor = Ingestor(
        source, TABLES, settings, store, poll_seconds=0.01, snapshot_interval_seconds=0.02, threads=threads, **more
    )
    ingestor.start()
    _wait(lambda: source.lag() == 0)
    assert ingestor.stop(DEADLINE)
    return ingestor


def _dense(ingestor: Ingestor) -> dict[str, np.ndarray]:
    with ingestor._counters.frozen() as state:
        arrays = state()[1]
    return {name: array for name, array in arrays.items() if name.startswith("0/")}


def test_threads_add_up_to_what_one_counts(tmp_path):
    log = _log(5, 30)
    one = _run(log, SnapshotStore(tmp_path / "1", 1), 1)
    rows = np.arange(200)
    large = np.arange(0, 400_000, 17)
    for threads in (2, 3):
        several = _run(log, SnapshotStore(tmp_path / f"{threads}", 1), threads)
        stats, expected = several.stats(), one.stats()
        assert stats.threads == threads
        assert (stats.messages, stats.accesses, stats.bytes) == (expected.messages, expected.accesses, expected.bytes)
        assert stats.rejected_accesses == expected.rejected_accesses
        assert several.query("small", rows).tolist() == one.query("small", rows).tolist()
        assert several.profile().samples == one.profile().samples
        profile, wanted = several.profile().tables[0], one.profile().tables[0]
        assert profile.hot_rows.tolist() == wanted.hot_rows.tolist()
        assert profile.hot_share.tolist() == wanted.hot_share.tolist()
        assert several.sequence_length_quantiles("small", [0.5, 1.0]).tolist() == [100.0, 300.0]
        exact = SketchSet(TABLES, 2**30, None, UNDECAYED.max_future_seconds, 100)
        for messages in log.values():
            for message in messages:
                for batch in decode(message, 2**20):
                    exact.ingest(batch.table, batch.rows, 0, batch.event_time_seconds)
        assert (several.query("large", large) >= exact.query("large", large)).all(), "never too few"
        assert {name: array.tobytes() for name, array in _dense(several).items() if "low" in name} == {
            name: array.tobytes() for name, array in _dense(one).items() if "low" in name
        }


def test_the_state_on_disk_does_not_know_the_threads(tmp_path):
    log = _log(3, 40)
    ample = dataclasses.replace(UNDECAYED, memory_bytes=30_000_000)
    whole = _run(log, SnapshotStore(tmp_path / "whole", 1), 1, ample)
    upto = 0
    for threads in (2, 1, 3, 2):
        upto += 10
        part = {name: messages[:upto] for name, messages in log.items()}
        ingestor = _run(part, SnapshotStore(tmp_path / "state", 2), threads, ample)
        assert ingestor.stats().threads == threads
        assert not ingestor.stats().restore_problems
    rows = np.arange(200)
    assert ingestor.query("small", rows).tolist() == whole.query("small", rows).tolist()
    assert ingestor.profile().samples == whole.profile().samples


def test_memory_is_that_of_all_threads_together(tmp_path):
    for threads in (1, 2, 4):
        ingestor = _ingestor_of(tmp_path / str(threads), threads)
        assert sum(choice.bytes for choice in ingestor.choices()) <= UNDECAYED.memory_bytes
        assert ingestor.stats().threads == threads
    with pytest.raises(SketchError, match="ingest_threads"):
        Ingestor(
            FakeSource(LOG), TABLES, dataclasses.replace(SETTINGS, memory_bytes=300_000),
            SnapshotStore(tmp_path, 1), threads=60,
        )  # fmt: skip
    with pytest.raises(SketchError, match="65 ingest threads"):
        _ingestor_of(tmp_path, 65)


def _ingestor_of(path, threads: int) -> Ingestor:
    return Ingestor(FakeSource(LOG), TABLES, UNDECAYED, SnapshotStore(path, 1), threads=threads)


def test_saved_counters_that_fill_the_memory_limit_the_threads(tmp_path):
    _run(_log(2, 3), SnapshotStore(tmp_path, 1), 1)
    again = _ingestor_of(tmp_path, 4)
    assert again.stats().threads < 4
    assert "ingest threads are used" in again.stats().restore_problems[0]
    assert again.profile().samples > 0


def test_a_snapshot_waits_for_what_the_threads_still_count(tmp_path):
    """Positions move when messages are dealt: without the wait they would name messages not counted yet."""
    release = threading.Event()

    def slow(payload, limit):
        release.wait(0.05)
        return decode(payload, limit)

    source = FakeSource(_log(4, 6), per_poll=4)
    store = SnapshotStore(tmp_path, 50)
    ingestor = Ingestor(
        source, TABLES, UNDECAYED, store, poll_seconds=0.01, snapshot_interval_seconds=0.0, threads=3, decode=slow,
        save_in_background=False,
    )  # fmt: skip
    ingestor.start()
    _wait(lambda: source.lag() == 0)
    assert ingestor.stop(DEADLINE)
    from flexd.sketch import snapshot

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
    sketches = SketchSet(TABLES, 2**24, None)
    return sum(sketches.ingest(b.table, b.rows, 0, b.event_time_seconds).accepted for b in decode(message, 2**20))


def test_ingest_goes_on_while_a_snapshot_is_written_and_positions_are_those_of_the_copy(tmp_path):
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
    ingestor.save_soon()
    ingestor.start()
    _wait(lambda: source.next["p"] >= 20)
    assert source.committed == [], "nothing is committed before it is durable"
    written.set()
    gate.set()
    _wait(lambda: source.lag() == 0 and source.committed)
    assert source.committed[0]["p"] < 20
    assert ingestor.stop(DEADLINE)
    assert source.committed[-1] == {"p": 60}


def test_bad_input_on_threads_is_counted_once(tmp_path):
    log = _log(3, 10)
    for messages in log.values():
        messages[4] = b"garbage"
        messages[7] = b"x" * 5_000_000
    letters = DeadLetterFile(tmp_path / "dead.jsonl", 100_000, 64)
    ingestor = _run(log, SnapshotStore(tmp_path / "s", 1), 3, dead_letters=letters, max_message_bytes=2**20)
    assert ingestor.stats().rejected_messages == {"not_arrow_or_json": 3, "too_large": 3}
    assert ingestor.stats().messages == 30
    assert letters.written == len((tmp_path / "dead.jsonl").read_text().splitlines()) > 6


def test_an_idle_stream_decays_when_read_and_not_when_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "IDLE_AFTER_SECONDS", 0.05)
    settings = dataclasses.replace(SETTINGS, half_life_seconds=0.2)
    for threads in (1, 2):
        batch = AccessBatch("small", np.array([3], dtype=np.int32), 0, T0)
        source = FakeSource({"p": [encode_arrow([batch])]})
        ingestor = Ingestor(
            source, TABLES, settings, SnapshotStore(tmp_path / f"{threads}", 1), poll_seconds=0.01, threads=threads
        )
        ingestor.start()
        _wait(lambda ingestor=ingestor: ingestor.stats().idle_seconds > 0.4)
        assert 0 < ingestor.query("small", np.array([3]))[0] < 0.3
        assert ingestor.profile().tables[0].weight < 0.3
        assert ingestor.clock()["newest"] == T0.hex(), "the clock of the counters moves with events alone"
        source.problem = "broker away"
        assert ingestor.query("small", np.array([3]))[0] == 1.0, "an outage is not idleness"
        source.problem = None
        assert ingestor.stop(DEADLINE)


def test_a_snapshot_cut_or_flipped_anywhere_takes_its_positions_along(tmp_path):
    first = {"p": LOG["p0"][:4]}
    source = FakeSource(first)
    small = [dataclasses.replace(TABLES[0], rows=20)]
    settings = dataclasses.replace(UNDECAYED, memory_bytes=2**20)

    def run(source: FakeSource, store: SnapshotStore) -> Ingestor:
        ingestor = Ingestor(source, small, settings, store, poll_seconds=0.01, save_in_background=False)
        ingestor._read_some()
        ingestor._begin_save()
        ingestor._end_save()
        return ingestor

    store = SnapshotStore(tmp_path / "s", 3)
    before = run(source, store)
    source.per_poll = 1
    before._read_some()
    before._begin_save()
    before._end_save()
    newest, previous = store.paths()
    whole = newest.read_bytes()
    # Every length and every byte are tried where it costs nothing: test_sketch_snapshot.py.
    places = range(0, len(whole), max(1, len(whole) // 60))
    damaged = [whole[:length] for length in places]
    damaged += [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in places]
    for image in damaged:
        newest.write_bytes(image)
        restored = Ingestor(FakeSource(first), small, settings, SnapshotStore(tmp_path / "s", 3))
        assert restored._positions == {"p": 3}
        assert str(newest) in restored.stats().restore_problems[0]
        assert restored.profile().samples > 0
    assert previous.exists()
    newest.write_bytes(whole)
    assert Ingestor(FakeSource(first), small, settings, SnapshotStore(tmp_path / "s", 3))._positions == {"p": 4}


def test_one_thread_starts_no_other(tmp_path):
    ingestor = _ingestor(FakeSource(LOG), SnapshotStore(tmp_path, 1))
    before = threading.active_count()
    ingestor._workers.start()
    assert threading.active_count() == before
