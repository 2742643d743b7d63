"""A real daemon on a stream with garbage: all is consumed, counted under its reason and sampled (invariant 6)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch, Sink
from tests.support.flexd_processes import RunningDaemon, dead_letters, saved_sketches, weights

pytestmark = pytest.mark.slow

ROWS = 5_000
DEAD_LETTER_BYTES = 1_000_000
TABLES = [{"name": "item", "rows": ROWS, "dim": 8}, {"name": "user", "rows": 300, "dim": 8}]


def _wrong_type() -> bytes:
    """A well-formed Arrow message whose row ids are floating point."""
    schema = pa.schema(
        [
            ("table", pa.utf8()),
            ("rows", pa.list_(pa.float64())),
            ("source_rank", pa.int32()),
            ("event_time", pa.float64()),
        ]
    )
    batch = pa.record_batch(
        [pa.array(["item"]), pa.array([[1.0, 2.0]]), pa.array([0], pa.int32()), pa.array([5.0])], schema=schema
    )
    return schema.serialize().to_pybytes() + batch.serialize().to_pybytes()


@dataclass
class Garbled:
    """A stream with 1 % garbage, and what is to be counted of it."""

    messages: int = 4_000
    counts: np.ndarray = field(default_factory=lambda: np.zeros(ROWS, np.int64))
    rejected_messages: Counter[str] = field(default_factory=Counter)
    rejected_accesses: Counter[str] = field(default_factory=Counter)

    def send(self, sink: Sink) -> None:
        rng = np.random.default_rng(5)
        bad = self._garbage()
        every = self.messages // len(bad)
        assert len(bad) >= self.messages // 100
        for number in range(self.messages):
            if number % every == every // 2 and bad:
                sink.send(bad.pop())
            else:
                sink.send(self._good(rng.zipf(1.2, 100) % ROWS, number))
        assert not bad
        sink.flush(30.0)

    def _good(self, rows: np.ndarray, number: int) -> bytes:
        np.add.at(self.counts, rows, 1)
        return encode_arrow([AccessBatch("item", rows.astype(np.int64), number % 4, 1000.0 + number)])

    def _garbage(self) -> list[bytes]:
        rows = np.arange(10, dtype=np.int64)
        good = encode_arrow([AccessBatch("item", rows, 0, 1.0)])
        entry = {"table": "item", "rows": [1], "source_rank": 0, "event_time": 1.0}
        made: list[bytes] = []
        for reason, payload in (
            ("corrupt", good[: len(good) // 2]),
            ("corrupt", good[:-8]),
            ("wrong_type", _wrong_type()),
            ("wrong_type", json.dumps({**entry, "rows": "many"}).encode()),
            ("wrong_schema", json.dumps({**entry, "colour": "red"}).encode()),
            ("bad_json", b'{"table": "item", '),
            ("not_arrow_or_json", bytes(range(128, 256))),
            ("bad_event_time", json.dumps({**entry, "event_time": -1}).encode()),
            ("empty", b"\n"),
        ):
            made += [payload] * 3
            self.rejected_messages[reason] += 3
        made.append(bytes(50_000_000))
        self.rejected_messages["too_large"] += 1
        for reason, batch in (
            ("unknown_table", AccessBatch("nobody", rows, 0, 1000.0)),
            ("negative_row", AccessBatch("item", rows - 10, 0, 1000.0)),
            ("row_out_of_range", AccessBatch("item", rows + ROWS, 0, 1000.0)),
        ):
            # With good accesses in the same message, which are to be counted.
            made += [encode_arrow([batch, AccessBatch("item", rows, 0, 1000.0)])] * 5
            self.rejected_accesses[reason] += 5 * len(rows)
            self.counts[rows] += 5
        # Bad and good rows in one entry.
        made.append(encode_arrow([AccessBatch("item", np.array([-3, 7, ROWS, ROWS - 1, 2**62]), 0, 1000.0)]))
        self.rejected_accesses += Counter(negative_row=1, row_out_of_range=2)
        np.add.at(self.counts, [7, ROWS - 1], 1)
        np.random.default_rng(1).shuffle(made)
        return made


def _settings(log: Path) -> dict[str, Any]:
    return {
        "tables": TABLES,
        "stream": {"source": {"kind": "file_log", "path": str(log)}, "dead_letter_bytes": DEAD_LETTER_BYTES},
        # Counts for ever, so that counters are numbers of accesses.
        "sketch": {"memory_bytes": 2**22, "half_life_seconds": None},
    }


def _seen(counts: dict[str, int]) -> dict[str, int]:
    """Without the reasons that are shown at 0."""
    return {reason: count for reason, count in counts.items() if count}


def _check(daemon: RunningDaemon, stream: Garbled) -> None:
    status = daemon.drain(stream.messages)
    assert status["stream"]["messages"] == stream.messages
    assert status["stream"]["problem"] is None
    assert _seen(status["stream"]["rejected_messages"]) == dict(stream.rejected_messages)
    assert status["healthy"] is True
    assert httpx.get(f"{daemon.url}/healthz", timeout=5).status_code == 200
    metrics = daemon.metrics()
    assert metrics["flexd_ingest_messages_total"] == stream.messages
    assert metrics["flexd_ingest_lag_messages"] == 0
    assert metrics["flexd_ingest_accesses_total"] == stream.counts.sum()
    for reason, count in stream.rejected_messages.items():
        assert metrics[f"flexd_ingest_rejected_messages_total{{{reason}}}"] == count, reason
    for reason, count in stream.rejected_accesses.items():
        assert metrics[f"flexd_ingest_rejected_accesses_total{{{reason}}}"] == count, reason
    size, samples = dead_letters(daemon.config.state.dir / "dead-letters.jsonl")
    assert size <= DEAD_LETTER_BYTES
    assert set(samples) == set(stream.rejected_messages) | set(stream.rejected_accesses)
    daemon.process.stop()
    sketches = saved_sketches(daemon.config)
    assert sketches.samples == stream.counts.sum()
    found = weights(sketches, daemon.config)
    assert np.array_equal(found["item"], stream.counts)
    assert found["user"].sum() == 0


def test_a_file_log_with_garbage_is_consumed_to_the_end(tmp_path: Path) -> None:
    stream = Garbled()
    sink = FileLogSink(tmp_path / "log", "p0")
    with RunningDaemon(tmp_path, _settings(tmp_path / "log")) as daemon:
        stream.send(sink)
        sink.close()
        _check(daemon, stream)
