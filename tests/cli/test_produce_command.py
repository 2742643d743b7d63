"""``flexd produce`` to a file log: a daemon reads the trace, at the requested times and with the requested names."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from flexd.cli.exit_codes import ExitCode
from flexd.cli.produce_command import MAX_FUTURE_SECONDS
from flexd.config.stream import SketchConfig
from flexd.core.keyspace import TableSpec
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import AccessCounts, SketchSettings
from flexd.stream.codecs.codec import decode
from flexd.stream.file_log.log import FileLogSource
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


@pytest.fixture
def message(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda accesses: monkeypatch.setattr("flexd.cli.produce_command.MESSAGE_ACCESSES", accesses)


def test_every_event_arrives_once_in_order(flexd_command, trace, tmp_path, message):
    message(300)
    log = tmp_path / "log"
    done = flexd_command("produce", trace, "--log", log, "--as-dated", "-o", "json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["messages"], summary["accesses"], summary["failed"]) == (4, EVENTS, 0)
    found, events = read(log), load_trace(trace)
    for index, name in enumerate(events.table_names):
        rows = [row for table, rows, _, _ in found if table == name for row in rows]
        assert rows == events.row[events.table == index].tolist()
    assert [rank for _, _, rank, _ in found] == [0] * 8
    assert [at for table, _, _, at in found if table == "items"] == [events.seconds[i] for i in (299, 599, 899, 999)]


def long_trace(path: Path, days: float) -> Path:
    """Write a trace that is years old and spans ``days``."""
    random = np.random.default_rng(2)
    np.savez(
        path, row=random.integers(0, 50, EVENTS), ts=np.linspace(1e9, 1e9 + days * 86_400, EVENTS),
        table_rows=np.array([50]), table_names=np.array(["item"]),
    )  # fmt: skip
    return path


def counted_by_a_daemon(log: Path) -> dict[str, int]:
    """Count the messages of a file log with the daemon's counters, as if they had just arrived."""
    tables = SketchSet([TableSpec("items", 50, 4)], SketchSettings(2**20, 3600.0))
    counts = sum(
        (
            tables.ingest(table, np.array(rows, np.int64), rank, at, None, time.time())
            for table, rows, rank, at in read(log)
        ),
        AccessCounts(),
    )
    return {"accepted": counts.accepted, "future_clamped": counts.future_clamped, "late": counts.late}


def test_a_long_old_trace_is_clamped_only_where_it_is_dated_ahead_of_its_arrival(flexd_command, tmp_path, message):
    """100 messages over 10 days, sent at once."""
    message(10)
    trace = long_trace(tmp_path / "old.npz", days=10.0)
    arguments = ("--table", "item=items", "--yes")
    for options in (("--now", "end"), ("--as-dated",), ("--speed", 864_000)):
        log = tmp_path / options[-1 if len(options) == 1 else 0].strip("-")
        done = flexd_command("produce", trace, "--log", log, *arguments, *options)
        assert (done.returncode, done.stderr) == (0, "")
        assert counted_by_a_daemon(log) == {"accepted": EVENTS, "future_clamped": 0, "late": 0}

    ahead = flexd_command("produce", trace, "--log", tmp_path / "ahead", *arguments, "--now", "start")
    assert ahead.returncode == 0
    assert "messages of 100 are dated up to 10 d 0 h after they are sent" in ahead.stderr
    counted = counted_by_a_daemon(tmp_path / "ahead")
    assert counted["accepted"] == EVENTS
    assert counted["future_clamped"] > EVENTS * 0.9


def test_speed_paces_by_the_times_of_the_trace_and_starts_now(flexd_command, trace, tmp_path, message):
    """99.9 s of events take one second: the gaps are a hundredth, and a message is dated when it is sent."""
    message(100)
    before = time.time()
    done = flexd_command("produce", trace, "--log", tmp_path / "log", "--speed", 100, "-o", "json", "--yes")
    after = time.time()
    assert done.returncode == 0, done.stderr
    assert 0.999 <= json.loads(done.stdout)["seconds"] <= after - before
    times = sorted({at for _, _, _, at in read(tmp_path / "log")})
    assert np.diff(times) == pytest.approx([0.1] * 9, abs=1e-5)
    assert before + 0.099 <= times[0]
    assert times[-1] <= after, "no message is dated in the future"


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        (("--now", "end"), -99.9, 0.0),
        (("--now", "start"), 0.0, 99.9),
        (("--now", "end", "--speed", 1000), -0.0999, 0.0),
        (("--now", "start", "--rate", 1e6), 0.0, 99.9),
    ],
)
def test_a_trace_starts_or_ends_now(flexd_command, trace, tmp_path, message, arguments, first, last):
    message(1)
    before = time.time()
    done = flexd_command("produce", trace, "--log", tmp_path / "log", *arguments, "--yes")
    after = time.time()
    assert done.returncode == 0, done.stderr
    times = [at for _, _, _, at in read(tmp_path / "log")]
    assert len(times) == EVENTS
    assert before + first - 1e-3 <= times[0] <= after + first + 1e-3
    assert times[-1] - times[0] == pytest.approx(last - first, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--table", "items"), "not of the form OLD=NEW"),
        (("--table", "=items"), "not of the form OLD=NEW"),
        (("--table", "items=a", "--table", "items=b"), "'items' is renamed twice"),
        (("--table", "shops=a"), "the trace has no table 'shops'"),
        (("--table", "items=users"), "two tables of the trace would be named 'users'"),
        (("--speed", 2, "--rate", 5), "--speed and --rate both set the pace"),
        (("--now", "end", "--as-dated"), "--now shifts the event times that --as-dated keeps"),
        (("--now", "middle"), "'middle' is not one of 'start', 'end'"),
    ],
)
def test_contradicting_arguments_are_refused(flexd_command, trace, tmp_path, arguments, says):
    done = flexd_command("produce", trace, "--log", tmp_path / "log", *arguments, "--yes")
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert says in done.stderr
    assert not (tmp_path / "log").exists()


def test_the_future_limit_is_the_configurations_default():
    assert SketchConfig().max_future_seconds == MAX_FUTURE_SECONDS


def test_a_dry_run_sends_nothing(flexd_command, trace, tmp_path):
    done = flexd_command("produce", trace, "--log", tmp_path / "log", "--dry-run")
    assert done.returncode == 0
    assert f"1,000 accesses in 1 message to file log {tmp_path / 'log'}" in done.stdout
    assert not (tmp_path / "log").exists()
    paced = flexd_command("produce", trace, "--log", tmp_path / "log", "--dry-run", "--speed", 1, "-o", "json")
    assert json.loads(paced.stdout)["seconds"] == pytest.approx(99.9)
    assert json.loads(paced.stdout)["sent"] is False


@pytest.mark.parametrize(
    ("tables", "source", "says"),
    [
        ([("items", 50)], {"kind": "file_log", "path": "log"}, "table 'users' is not configured"),
        ([("items", 10), ("users", 60)], {"kind": "file_log", "path": "log"}, "10 are configured"),
        ([("items", 50), ("users", 60)], {"kind": "synthetic"}, "a source of kind 'synthetic' accepts no messages"),
        ([("items", 50), ("users", 60)], {"kind": "file_log", "path": "log"}, ""),
    ],
)
def test_a_configuration_gives_target_and_tables(flexd_command, trace, tmp_path, monkeypatch, tables, source, says):
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


class UndeliveringSink:
    """A sink that accepts every message and fails to deliver one."""

    messages_failed = 1

    def send(self, payload: bytes) -> None:
        pass

    def flush(self, timeout_seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


def test_lost_deliveries_are_an_exit_status(flexd_command, trace, monkeypatch):
    monkeypatch.setattr("flexd.stream.kafka.sink.KafkaSink", lambda *_, **__: UndeliveringSink())
    done = flexd_command("produce", trace, "--kafka", "127.0.0.1:1", "-o", "json")
    assert done.returncode == ExitCode.REFUSED
    assert json.loads(done.stdout)["target"] == "topic flexd-accesses at 127.0.0.1:1"
