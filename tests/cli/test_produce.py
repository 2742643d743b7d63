"""``flexd produce``: what a daemon reads afterwards is the trace."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from flexd.cli.exit_codes import ExitCode
from flexd.core.errors import StreamError
from flexd.stream.codecs.codec import decode
from flexd.stream.file_log.log import FileLogSource
from flexd.stream.replay import replay, trace_batches
from flexd.stream.trace import load_trace

EVENTS = 1000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    path = tmp_path / "events.npz"
    np.savez(
        path, row=random.integers(0, 50, EVENTS), table=random.integers(0, 2, EVENTS), ts=np.arange(EVENTS) / 10 + 5e8,
        table_rows=np.array([50, 60]), table_names=np.array(["items", "users"]),
    )  # fmt: skip
    return path


def read(log: Path) -> list[tuple[str, list[int], int, float]]:
    source = FileLogSource(log)
    batches = []
    while messages := source.poll(0.2):
        batches += [batch for message in messages for batch in decode(message.payload, 2**20)]
    source.close()
    return [(b.table, b.rows.tolist(), b.source_rank, b.event_time_seconds) for b in batches]


def test_every_event_arrives_once_in_order(flexd_command, trace, tmp_path):
    log = tmp_path / "log"
    done = flexd_command("produce", trace, "--log", log, "--message", 300, "--ranks", 3, "--as-dated", "-o", "json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["messages"], summary["accesses"], summary["failed"]) == (4, EVENTS, 0)
    found, events = read(log), load_trace(trace)
    for index, name in enumerate(events.table_names):
        rows = [row for table, rows, _, _ in found if table == name for row in rows]
        assert rows == events.row[events.table == index].tolist()
    assert [rank for _, _, rank, _ in found] == [0, 0, 1, 1, 2, 2, 0, 0]
    assert [at for table, _, _, at in found if table == "items"] == [events.seconds[i] for i in (299, 599, 899, 999)]


def test_events_are_moved_to_now_unless_told_otherwise(flexd_command, trace, tmp_path):
    before = time.time()
    assert flexd_command("produce", trace, "--log", tmp_path / "log", "--limit", 10, "--yes").returncode == 0
    found = read(tmp_path / "log")
    assert sum(len(rows) for _, rows, _, _ in found) == 10
    assert before - 1 <= found[-1][3] <= time.time()


def test_a_dry_run_sends_nothing(flexd_command, trace, tmp_path):
    done = flexd_command("produce", trace, "--log", tmp_path / "log", "--dry-run")
    assert done.returncode == 0
    assert f"1,000 accesses in 1 messages to file log {tmp_path / 'log'}" in done.stdout
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("tables", "source", "says"),
    [
        ([("items", 50)], {"kind": "file_log", "path": "log"}, "table 'users' is not configured"),
        ([("items", 10), ("users", 60)], {"kind": "file_log", "path": "log"}, "10 are configured"),
        ([("items", 50), ("users", 60)], {"kind": "synthetic"}, "nobody can write to a source of kind 'synthetic'"),
        ([("items", 50), ("users", 60)], {"kind": "file_log", "path": "log"}, ""),
    ],
)
def test_a_configuration_says_where_to_and_what(flexd_command, trace, tmp_path, monkeypatch, tables, source, says):
    monkeypatch.chdir(tmp_path)
    document = {
        "job": "j",
        "tables": [{"name": name, "rows": rows, "dim": 4} for name, rows in tables],
        "stream": {"source": source},
    }
    (tmp_path / "flexd.yaml").write_text(yaml.safe_dump(document))
    done = flexd_command("produce", trace, "-c", "flexd.yaml")
    assert done.returncode == (ExitCode.USAGE if says else ExitCode.OK), done.stderr
    assert says in done.stderr
    assert (sum(len(rows) for _, rows, _, _ in read(tmp_path / "log")) if not says else 0) == (0 if says else EVENTS)


@pytest.mark.parametrize("arguments", [[], ["--log", "x", "--kafka", "y:1"], ["--kafka", "y:1", "-c", "z"]])
def test_exactly_one_target(flexd_command, trace, arguments):
    done = flexd_command("produce", trace, *arguments)
    assert done.returncode == ExitCode.USAGE
    assert "one of --log, --kafka and --config" in done.stderr


class Sink:
    """Refuses the first ``refusals`` messages; says that ``failed`` were not delivered."""

    def __init__(self, refusals: int, failed: int = 0) -> None:
        self.refusals, self.messages_failed = refusals, failed
        self.sent: list[bytes] = []
        self.flushed = 0

    def send(self, payload: bytes) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StreamError("not yet")
        self.sent.append(payload)

    def flush(self, timeout_seconds: float) -> None:
        self.flushed += 1

    def close(self) -> None:
        pass


def test_a_sink_that_is_not_ready_is_asked_again_within_the_deadline(trace):
    events = load_trace(trace)
    sink = Sink(refusals=1, failed=2)
    sent = replay(trace_batches(events, 500, 1), sink, patience_seconds=5.0)
    assert (sent.messages, sent.failed, len(sink.sent), sink.flushed) == (2, 2, 2, 1)
    with pytest.raises(StreamError, match="not yet"):
        replay(trace_batches(events, 500, 1), Sink(refusals=10**6), patience_seconds=0.01)


def test_a_pace_is_kept_and_a_stop_obeyed(trace):
    events, sink, seen = load_trace(trace), Sink(0), []
    sent = replay(trace_batches(events, 100, 1), sink, accesses_per_second=2000, progress=seen.append)
    assert sent.seconds >= 0.9 * 900 / 2000
    assert seen == list(range(100, EVENTS + 1, 100))
    stopped = replay(
        trace_batches(events, 100, 1), Sink(0), accesses_per_second=0.001, stopped=lambda: True
    )  # fmt: skip
    assert stopped.messages == 0


def test_lost_deliveries_are_an_exit_status(flexd_command, trace, monkeypatch):
    monkeypatch.setattr("flexd.stream.kafka.sink.KafkaSink", lambda *_, **__: Sink(0, failed=1))
    done = flexd_command("produce", trace, "--kafka", "127.0.0.1:1", "-o", "json")
    assert done.returncode == ExitCode.REFUSED
    assert json.loads(done.stdout)["target"] == "topic flexd-accesses at 127.0.0.1:1"
