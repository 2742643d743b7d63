"""Checks of the stream: its messages, its clock, its broker."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from flexd.core.errors import StreamError
from flexd.doctor import finding, stream
from flexd.doctor.finding import Finding, Level
from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from tests.support.doctor import config, levels


def message(table: str = "items", rows: tuple[int, ...] = (1, 2), at: float | None = None) -> bytes:
    return encode_arrow([AccessBatch(table, np.array(rows), 0, time.time() if at is None else at)])


@pytest.mark.parametrize(
    ("payloads", "level", "says"),
    [
        ((), Level.WARNING, "no messages"),
        ((message(),), Level.OK, "2 accesses of 1 messages fit"),
        ((message(), b"garbage"), Level.FAULT, "1 of 2 messages cannot be read"),
        ((message("users"),), Level.FAULT, "not configured: 'users' 2"),
        ((message(rows=(5, 100, -1)),), Level.FAULT, "beyond tables[].rows: 'items' 2"),
    ],
)
def test_messages_that_the_daemon_would_reject(tmp_path, payloads, level, says):
    found = next(stream.messages(config(tmp_path), "the log", payloads))
    assert (found.check, found.level) == ("messages", level)
    assert says in found.text
    assert bool(found.remedy) == (level is not Level.OK)


@pytest.mark.parametrize(("ahead", "level"), [(-30.0, Level.OK), (3600.0, Level.WARNING)])
def test_events_from_the_future_are_a_wrong_clock(tmp_path, ahead, level):
    found = list(stream.messages(config(tmp_path), "the log", [message(at=time.time() + ahead)]))[-1]
    assert (found.check, found.level) == ("event time", level)


def test_a_file_log_is_read_without_touching_it(tmp_path):
    wanted = config(tmp_path)
    assert levels(stream.stream(wanted, 1.0)) == {"stream warning": 1}
    sink = FileLogSink(tmp_path / "log", "p0")
    sink.send(message())
    sink.flush()
    before = sorted((path, path.stat().st_size) for path in (tmp_path / "log").rglob("*"))
    assert levels(stream.stream(wanted, 1.0)) == {"stream ok": 1, "messages ok": 1, "event time ok": 1}
    assert sorted((path, path.stat().st_size) for path in (tmp_path / "log").rglob("*")) == before
    sink.close()
    synthetic = config(tmp_path, stream={"source": {"kind": "synthetic"}})
    assert levels(stream.stream(synthetic, 1.0)) == {"stream skipped": 1}


def test_broker_and_topic(tmp_path, monkeypatch):
    wanted = config(tmp_path, stream={"source": {"kind": "kafka", "bootstrap_servers": "b:1", "topic": "t"}})
    seen = SimpleNamespace(partitions=0, messages=0, payloads=())
    monkeypatch.setattr("flexd.stream.kafka.topic_admin.inspect_topic", lambda *_, **__: seen)
    assert levels(stream.stream(wanted, 1.0)) == {"broker ok": 1, "topic fault": 1}
    seen.partitions, seen.payloads = 3, (message(),)
    assert levels(stream.stream(wanted, 1.0)) == {"broker ok": 1, "topic ok": 1, "messages ok": 1, "event time ok": 1}

    def fail(*_: object, **__: object) -> None:
        raise StreamError("b:1: NoBrokersAvailable", remedy="check the network")

    monkeypatch.setattr("flexd.stream.kafka.topic_admin.inspect_topic", fail)
    assert finding.run("stream", lambda: stream.stream(wanted, 1.0)) == [
        Finding("stream", Level.FAULT, "b:1: NoBrokersAvailable", "check the network")
    ]
