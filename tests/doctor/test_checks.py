"""The doctor's checks: the stream with its messages, clock and broker; the machine; a running daemon."""

import ctypes
import gzip
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import flexd
from flexd import doctor
from flexd.api.status import DaemonStatus
from flexd.api.stream import StreamStatus
from flexd.config.model import Config, parse_config
from flexd.core.errors import StreamError
from flexd.doctor import Finding, Level
from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch, RefusedMessages, StreamMessage
from tests.support.certificates import Authority


def config(directory: Path, **sections: object) -> Config:
    return parse_config(
        {
            "job": "j",
            "tables": [{"name": "items", "rows": 100, "dim": 4}],
            "stream": {"source": {"kind": "file_log", "path": str(directory / "log")}},
            "state": {"dir": str(directory / "state")},
            "sketch": {"memory_bytes": 2**20},
            **sections,
        }
    )


def levels(findings: Iterable[Finding]) -> Counter[str]:
    return Counter(f"{found.check} {found.level.value}" for found in findings)


def message(table: str = "items", rows: tuple[int, ...] = (1, 2), at: float | None = None) -> bytes:
    return encode_arrow([AccessBatch(table, np.array(rows), 0, time.time() if at is None else at)])


def sample(payloads: Sequence[bytes]) -> list[StreamMessage]:
    return [StreamMessage("t/0", 7 + number, payload) for number, payload in enumerate(payloads)]


@pytest.mark.parametrize(
    ("payloads", "level", "says"),
    [
        ((), Level.WARNING, "no messages"),
        ((message(),), Level.OK, "2 accesses of 1 messages fit"),
        ((message(), b"garbage"), Level.FAULT, "1 of 2 messages cannot be read, the first at offset 8 of t/0: "),
        ((message("users"),), Level.FAULT, "not configured: 'users' 2"),
        ((message(rows=(5, 100, -1)),), Level.FAULT, "beyond tables[].rows: 'items' 2"),
    ],
)
def test_messages_that_the_daemon_would_reject(tmp_path, payloads, level, says):
    found = next(doctor.messages(config(tmp_path), "the log", sample(payloads)))
    assert (found.check, found.level) == ("messages", level)
    assert says in found.text
    assert bool(found.remedy) == (level is not Level.OK)


LINE = b'{"table": "items", "rows": [1], "source_rank": 0, "event_time": 1700000000.5}'


@pytest.mark.parametrize(
    ("payload", "says", "remedy"),
    [
        (b"\0\0\0\0\x2a" + LINE, "a schema registry's header", "without the registry's serializer"),
        (b"[" + LINE + b"]", "a JSON array", "its objects, one a line"),
        (b"\xef\xbb\xbf" + LINE, "a byte-order mark", "UTF-8 without one"),
        (LINE.decode().encode("utf-16"), "a byte-order mark", "UTF-8 without one"),
        (gzip.compress(LINE, mtime=0), "gzip data", "compression.type"),
        (LINE.replace(b"1700000000.5", b"1700000000500"), "event_time 1700000000500.0", "seconds, not milliseconds"),
        (LINE[:-1] + b', "user": 7}', "columns ['table', 'rows', 'source_rank', 'event_time', 'user']", "['user'] out"),
    ],
)
def test_the_cause_of_an_unreadable_message_is_named_with_its_offset_and_the_remedy(tmp_path, payload, says, remedy):
    """Without tables too, beside messages that are readable or refused for another cause."""
    wanted = config(tmp_path, tables=[])
    other = RefusedMessages("t/1", 3, 4, "batch_too_large", "over 9 bytes decompressed", b"", 100)
    found = list(doctor.messages(wanted, "the log", [*sample([LINE, payload, payload]), other]))
    assert [each.level for each in found] == [Level.FAULT, Level.FAULT, Level.WARNING]
    assert "2 of 4 messages cannot be read, the first at offset 8 of t/0: " in found[0].text
    assert says in found[0].text
    assert remedy in found[0].remedy
    assert found[1].text.endswith("1 of 4 messages cannot be read, the first at offset 3 of t/1: "
                                  "over 9 bytes decompressed")  # fmt: skip


@pytest.mark.parametrize(("ahead", "level"), [(-30.0, Level.OK), (3600.0, Level.WARNING)])
def test_events_from_the_future_are_a_wrong_clock(tmp_path, ahead, level):
    found = list(doctor.messages(config(tmp_path), "the log", sample([message(at=time.time() + ahead)])))[-1]
    assert (found.check, found.level) == ("event time", level)


def test_a_file_log_is_read_without_touching_it(tmp_path):
    wanted = config(tmp_path)
    assert levels(doctor.stream(wanted, 1.0)) == {"stream warning": 1}
    sink = FileLogSink(tmp_path / "log", "p0")
    sink.send(message())
    sink.flush()
    before = sorted((path, path.stat().st_size) for path in (tmp_path / "log").rglob("*"))
    assert levels(doctor.stream(wanted, 1.0)) == {"stream ok": 1, "messages ok": 1, "event time ok": 1}
    assert sorted((path, path.stat().st_size) for path in (tmp_path / "log").rglob("*")) == before
    sink.close()
    synthetic = config(tmp_path, stream={"source": {"kind": "synthetic"}})
    assert levels(doctor.stream(synthetic, 1.0)) == {"stream skipped": 1}


def test_broker_and_topic(tmp_path, monkeypatch):
    wanted = config(tmp_path, stream={"source": {"kind": "kafka", "bootstrap_servers": "b:1", "topic": "t"}})
    seen = SimpleNamespace(partitions=0, offsets=0, newest=())
    monkeypatch.setattr("flexd.stream.kafka.topic_admin.inspect_topic", lambda *_, **__: seen)
    assert levels(doctor.stream(wanted, 1.0)) == {"broker ok": 1, "topic fault": 1}
    seen.partitions, seen.newest = 3, sample([message()])
    assert levels(doctor.stream(wanted, 1.0)) == {"broker ok": 1, "topic ok": 1, "messages ok": 1, "event time ok": 1}

    def fail(*_: object, **__: object) -> None:
        raise StreamError("b:1: NoBrokersAvailable", remedy="check the network")

    monkeypatch.setattr("flexd.stream.kafka.topic_admin.inspect_topic", fail)
    assert doctor.run("stream", lambda: doctor.stream(wanted, 1.0)) == [
        doctor.fault("stream", "b:1: NoBrokersAvailable", "check the network")
    ]


def test_disk(tmp_path, monkeypatch):
    wanted = config(tmp_path)
    assert levels(doctor.disk(wanted)) == {"disk ok": 1}
    assert not (tmp_path / "state").exists()
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**20))
    (found,) = doctor.disk(wanted)
    assert (found.level, "keep_snapshots" in found.remedy) == (Level.WARNING, True)
    # What the snapshots take already need not be free.
    (tmp_path / "state" / "snapshots").mkdir(parents=True)
    (tmp_path / "state").chmod(0o750)
    (tmp_path / "state" / "snapshots" / "snapshot-1.flexd").write_bytes(bytes(2**20))
    assert levels(doctor.disk(wanted)) == {"disk ok": 1}
    (tmp_path / "state").chmod(0o755)
    assert levels(doctor.disk(wanted)) == {"disk ok": 1, "disk warning": 1}
    (tmp_path / "state").chmod(0o700)
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert levels(doctor.disk(wanted)) == {"disk fault": 1}


@pytest.mark.parametrize(("state", "level"), [(0, Level.OK), (5, Level.WARNING), (-1, Level.SKIPPED)])
def test_clock(tmp_path, monkeypatch, state, level):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(adjtimex=lambda _: state))
    (found,) = doctor.clock(config(tmp_path))
    assert found.level is level


def test_secrets(tmp_path):
    assert levels(doctor.secrets(config(tmp_path))) == {"secrets ok": 1}
    secret = tmp_path / "secret"
    secret.write_text("k" * 32)
    secret.chmod(0o640)
    wanted = config(tmp_path, control={"secret_file": str(secret)})
    assert levels(doctor.secrets(wanted)) == {"secrets ok": 1}
    secret.chmod(0o644)
    (found,) = doctor.secrets(wanted)
    assert (found.level, found.remedy) == (Level.WARNING, f"chmod 0640 {secret}")
    secret.write_text("short")
    (found,) = doctor.run("secrets", lambda: doctor.secrets(wanted))
    assert found.level is Level.FAULT
    assert "short" not in found.text + found.remedy


def test_certificates(tmp_path):
    assert list(doctor.certificates(config(tmp_path))) == []
    files = Authority(tmp_path).issue("daemon", "127.0.0.1")
    files.key_file.chmod(0o640)
    tls = {"cert_file": str(files.cert_file), "key_file": str(files.key_file), "ca_file": str(files.ca_file)}
    wanted = config(tmp_path, control={"tls": tls})
    assert levels(doctor.certificates(wanted)) == {"certificates ok": 1}
    files.key_file.chmod(0o644)
    (found,) = doctor.certificates(wanted)
    assert (found.level, found.remedy) == (Level.WARNING, f"chmod 0640 {files.key_file}")
    files.ca_file.write_text("no PEM")
    (found,) = doctor.run("certificates", lambda: doctor.certificates(wanted))
    assert found.level is Level.FAULT
    assert "control.tls.ca_file" in found.text


def test_ports(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = config(tmp_path, control={"listen_port": port}, server={"port": 0})
        assert levels(doctor.ports(wanted, running=False)) == {"control port fault": 1, "api port skipped": 1}
        assert levels(doctor.ports(wanted, running=True)) == {"control port ok": 1, "api port skipped": 1}
    assert levels(doctor.ports(wanted, running=False)) == {"control port ok": 1, "api port skipped": 1}
    assert levels(doctor.ports(wanted, running=True)) == {"control port fault": 1, "api port skipped": 1}
    on_socket = config(tmp_path, control={"listen_port": 0}, server={"unix_socket": str(tmp_path / "s")})
    assert levels(doctor.ports(on_socket, running=False)) == {"control port skipped": 1}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ready": True}, {"daemon ok": 1, "running configuration ok": 1}),
        ({"ready": False, "reasons": ("ranks: none",)}, {"daemon warning": 1, "running configuration ok": 1}),
        ({"healthy": False, "reasons": ("stuck",)}, {"daemon fault": 1, "running configuration ok": 1}),
        ({"ready": True, "paused": True}, {"daemon warning": 1, "running configuration ok": 1}),
    ],
)
def test_what_the_daemon_says(fields, expected):
    status = DaemonStatus(job="j", version=flexd.__version__, stream=StreamStatus(source="tap"), **fields)
    assert levels(doctor.daemon(status, [])) == expected
    half = StreamStatus(
        source="kafka", missing_partitions=("a/1", "a/3"), missing_since_unix_seconds=time.time() - 90
    )  # fmt: skip
    found = [each for each in doctor.daemon(status.model_copy(update={"stream": half}), []) if each.check == "stream"]
    assert [each.text for each in found] == [
        "2 partitions not assigned to the daemon for 1 min 30 s, and not counted: a/1, a/3"
    ]
    assert "group_id of its own" in found[0].remedy
    other = status.model_copy(update={"version": "0.0.1"})
    assert levels(doctor.daemon(other, ["log.level"]))["running configuration warning"] == 1
    assert sum(levels(doctor.daemon(other, ["log.level"])).values()) == 3
