"""A real daemon on a stream with garbage: all is consumed, counted under its reason and sampled (invariant 6)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from tests.support.flexd_processes import RunningDaemon, dead_letters, saved_sketches, weights

pytestmark = pytest.mark.slow

ROWS = 5_000
DEAD_LETTER_BYTES = 1_000_000
MESSAGES = 3_000
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


def garbage() -> list[tuple[bytes, str]]:
    """Return messages with the reason for which each is rejected as a whole."""
    good = encode_arrow([AccessBatch("item", np.arange(10, dtype=np.int64), 0, 1.0)])
    entry = {"table": "item", "rows": [1], "source_rank": 0, "event_time": 1.0}
    return 3 * [
        (good[: len(good) // 2], "corrupt"),
        (good[:-8], "corrupt"),
        (_wrong_type(), "wrong_type"),
        (json.dumps({**entry, "rows": "many"}).encode(), "wrong_type"),
        (json.dumps({**entry, "colour": "red"}).encode(), "wrong_schema"),
        (b'{"table": "item", ', "bad_json"),
        (bytes(range(128, 256)), "not_arrow_or_json"),
        (json.dumps({**entry, "event_time": -1}).encode(), "bad_event_time"),
        (b"\n", "empty"),
    ] + [(bytes(50_000_000), "too_large")]


def half_good() -> list[tuple[bytes, dict[str, int], Sequence[int]]]:
    """Return messages with the number of accesses that are rejected, by reason, and the rows that are counted."""
    rows = np.arange(10, dtype=np.int64)
    found: list[tuple[bytes, dict[str, int], Sequence[int]]] = []
    for reason, batch in (
        ("unknown_table", AccessBatch("nobody", rows, 0, 1000.0)),
        ("negative_row", AccessBatch("item", rows - 10, 0, 1000.0)),
        ("row_out_of_range", AccessBatch("item", rows + ROWS, 0, 1000.0)),
    ):
        found += 5 * [(encode_arrow([batch, AccessBatch("item", rows, 0, 1000.0)]), {reason: 10}, range(10))]
    # Bad and good rows in one entry.
    mixed = AccessBatch("item", np.array([-3, 7, ROWS, ROWS - 1, 2**62]), 0, 1000.0)
    return [*found, (encode_arrow([mixed]), {"negative_row": 1, "row_out_of_range": 2}, [7, ROWS - 1])]


def _settings(log: Path) -> dict[str, Any]:
    return {
        "tables": TABLES,
        "stream": {"source": {"kind": "file_log", "path": str(log)}, "dead_letter_bytes": DEAD_LETTER_BYTES},
        # Counts for ever, so that counters are numbers of accesses.
        "sketch": {"memory_bytes": 2**22, "half_life_seconds": None},
    }


def test_a_file_log_with_garbage_is_consumed_to_the_end(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    drawn = rng.zipf(1.2, (MESSAGES, 100)) % ROWS
    bad, half = garbage(), half_good()
    messages = [
        encode_arrow([AccessBatch("item", rows.astype(np.int64), number % 4, 1000.0 + number)])
        for number, rows in enumerate(drawn)
    ]
    for message, *_ in (*bad, *half):
        messages.insert(int(rng.integers(len(messages))), message)
    assert len(bad) + len(half) >= MESSAGES // 100
    counts = np.bincount(np.concatenate([drawn.ravel(), *(rows for *_, rows in half)]), minlength=ROWS)
    rejected_messages = Counter(reason for _, reason in bad)
    rejected_accesses: Counter[str] = sum((Counter(rejected) for _, rejected, _ in half), Counter())
    with RunningDaemon(tmp_path, _settings(tmp_path / "log")) as daemon:
        sink = FileLogSink(tmp_path / "log", "p0")
        for message in messages:
            sink.send(message)
        sink.flush(30.0)
        sink.close()
        status = daemon.drain(len(messages))
        assert status["stream"]["messages"] == len(messages)
        assert status["stream"]["problem"] is None
        shown = {reason: count for reason, count in status["stream"]["rejected_messages"].items() if count}
        assert shown == dict(rejected_messages)
        assert status["healthy"] is True
        assert httpx.get(f"{daemon.url}/healthz", timeout=5).status_code == 200
        metrics = daemon.metrics()
        assert metrics["flexd_ingest_messages_total"] == len(messages)
        assert metrics["flexd_ingest_lag_messages"] == 0
        assert metrics["flexd_ingest_accesses_total"] == counts.sum()
        for kind, rejected in (("messages", rejected_messages), ("accesses", rejected_accesses)):
            for reason, count in rejected.items():
                assert metrics[f"flexd_ingest_rejected_{kind}_total{{{reason}}}"] == count, reason
        size, samples = dead_letters(daemon.config.state.dir / "dead-letters.jsonl")
        assert size <= DEAD_LETTER_BYTES
        assert set(samples) == set(rejected_messages) | set(rejected_accesses)
        daemon.process.stop()
        sketches = saved_sketches(daemon.config)
        assert sketches.samples == counts.sum()
        found = weights(sketches, daemon.config)
        assert np.array_equal(found["item"], counts)
        assert found["user"].sum() == 0
