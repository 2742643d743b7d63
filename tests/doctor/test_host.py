"""Checks of the machine: disk, clock, secrets, ports, versions."""

from __future__ import annotations

import ctypes
import socket
from types import SimpleNamespace

import pytest

from flexd.doctor import finding, host
from flexd.doctor.finding import Level
from tests.support.certificates import Authority
from tests.support.doctor import config, levels


def test_disk(tmp_path, monkeypatch):
    wanted = config(tmp_path)
    assert levels(host.disk(wanted)) == {"disk ok": 1}
    assert not (tmp_path / "state").exists()
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**20))
    (found,) = host.disk(wanted)
    assert (found.level, "keep_snapshots" in found.remedy) == (Level.WARNING, True)
    # What the snapshots take already need not be free.
    (tmp_path / "state" / "snapshots").mkdir(parents=True)
    (tmp_path / "state").chmod(0o750)
    (tmp_path / "state" / "snapshots" / "snapshot-1.flexd").write_bytes(bytes(2**20))
    assert levels(host.disk(wanted)) == {"disk ok": 1}
    (tmp_path / "state").chmod(0o755)
    assert levels(host.disk(wanted)) == {"disk ok": 1, "disk warning": 1}
    (tmp_path / "state").chmod(0o700)
    monkeypatch.setattr(host.os, "access", lambda *_: False)
    assert levels(host.disk(wanted)) == {"disk fault": 1}


@pytest.mark.parametrize(("state", "level"), [(0, Level.OK), (5, Level.WARNING), (-1, Level.SKIPPED)])
def test_clock(tmp_path, monkeypatch, state, level):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(adjtimex=lambda _: state))
    (found,) = host.clock(config(tmp_path))
    assert found.level is level


def test_secrets(tmp_path):
    assert levels(host.secrets(config(tmp_path))) == {"secrets ok": 1}
    secret = tmp_path / "secret"
    secret.write_text("k" * 32)
    secret.chmod(0o640)
    wanted = config(tmp_path, control={"secret_file": str(secret)})
    assert levels(host.secrets(wanted)) == {"secrets ok": 1}
    secret.chmod(0o644)
    (found,) = host.secrets(wanted)
    assert (found.level, found.remedy) == (Level.WARNING, f"chmod 0640 {secret}")
    secret.write_text("short")
    (found,) = finding.run("secrets", lambda: host.secrets(wanted))
    assert found.level is Level.FAULT
    assert "short" not in found.text + found.remedy


def test_certificates(tmp_path):
    assert list(host.certificates(config(tmp_path))) == []
    files = Authority(tmp_path).issue("daemon", "127.0.0.1")
    files.key_file.chmod(0o640)
    tls = {"cert_file": str(files.cert_file), "key_file": str(files.key_file), "ca_file": str(files.ca_file)}
    wanted = config(tmp_path, control={"tls": tls})
    assert levels(host.certificates(wanted)) == {"certificates ok": 1}
    files.key_file.chmod(0o644)
    (found,) = host.certificates(wanted)
    assert (found.level, found.remedy) == (Level.WARNING, f"chmod 0640 {files.key_file}")
    files.ca_file.write_text("no PEM")
    (found,) = finding.run("certificates", lambda: host.certificates(wanted))
    assert found.level is Level.FAULT
    assert "control.tls.ca_file" in found.text


def test_ports(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = config(tmp_path, control={"listen_port": port}, server={"port": 0})
        assert levels(host.ports(wanted, running=False)) == {"control port fault": 1, "api port skipped": 1}
        assert levels(host.ports(wanted, running=True)) == {"control port ok": 1, "api port skipped": 1}
    assert levels(host.ports(wanted, running=False)) == {"control port ok": 1, "api port skipped": 1}
    assert levels(host.ports(wanted, running=True)) == {"control port fault": 1, "api port skipped": 1}
    on_socket = config(tmp_path, control={"listen_port": 0}, server={"unix_socket": str(tmp_path / "s")})
    assert levels(host.ports(on_socket, running=False)) == {"control port skipped": 1}
