"""Addresses of the channel, and TLS 1.3: both ends show a certificate, and files are replaced while it runs."""

from __future__ import annotations

import dataclasses
import logging
import ssl
from pathlib import Path

import pytest

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.protocol import network
from flexd.control.protocol.network import ChannelCredentials, TlsContext, TlsFiles, parse_address
from flexd.control.protocol.wire import MAX_BODY_BYTES
from flexd.core.errors import AuthenticationError, ConfigError, ControlError
from tests.support.certificates import Authority
from tests.support.channel import (
    DEADLINE_SECONDS,
    SECRET,
    EchoDaemon,
    echo_daemon,
    honest_peer,
    is_closed,
    raw_connection,
    round_trip,
)
from tests.support.until import until


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ControlError, match="host:port"):
        parse_address(address)


def test_host_names_and_ipv6_addresses_are_parsed() -> None:
    assert parse_address("node-1:29400") == ("node-1", 29400)
    assert parse_address("[::1]:29400") == ("::1", 29400)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def daemon_files(authority: Authority) -> TlsFiles:
    return authority.issue("daemon", "127.0.0.1", "flexd.example")


@pytest.fixture(scope="module")
def rank_files(authority: Authority) -> TlsFiles:
    return authority.issue("rank")


def refused(daemon: EchoDaemon, reason: str, count: int = 1) -> None:
    until(lambda: daemon.server.counters().refused.get(reason) == count, DEADLINE_SECONDS, daemon.server.counters)


def connect(daemon: EchoDaemon, tls: TlsFiles | None, secret: bytes | None = None) -> ChannelClient:
    client = ChannelClient.connect("127.0.0.1", daemon.server.port, ChannelCredentials(secret, tls), DEADLINE_SECONDS)
    round_trip(client, b"first", b"")
    return client


def test_ranks_with_a_certificate_of_the_ca_are_let_in(daemon_files: TlsFiles, rank_files: TlsFiles) -> None:
    with echo_daemon(credentials=ChannelCredentials(None, daemon_files)) as daemon:
        client = connect(daemon, rank_files)
        assert isinstance(client._socket, ssl.SSLSocket)
        assert client._socket.version() == "TLSv1.3"
        for size in (0, 20_000, MAX_BODY_BYTES):
            round_trip(client, b"size", bytes(size))


def test_certificate_and_secret_are_both_needed_where_both_are_given(
    daemon_files: TlsFiles, rank_files: TlsFiles
) -> None:
    with echo_daemon(credentials=ChannelCredentials(SECRET, daemon_files)) as daemon:
        connect(daemon, rank_files, SECRET).close()
        with pytest.raises(AuthenticationError, match="secret"):
            connect(daemon, rank_files)
        refused(daemon, "wrong_secret")


def test_other_clients_are_refused_and_counted(
    daemon_files: TlsFiles, rank_files: TlsFiles, authority: Authority, other: Authority
) -> None:
    credentials = ChannelCredentials(None, daemon_files)
    with echo_daemon(credentials=credentials) as daemon, honest_peer(daemon, ChannelCredentials(None, rank_files)):
        # Of another CA.
        with pytest.raises(ControlError):
            connect(daemon, other.issue("intruder", trusts=authority))
        refused(daemon, "tls", 1)
        # None at all, in TLS 1.3 and 1.2.
        for highest in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
            context = ssl.create_default_context(cafile=str(authority.ca_file))
            context.maximum_version = highest
            with pytest.raises(OSError, match=r"(?i)certificate|version|alert|reset|eof"):
                say_hello(context, daemon.server.port)
        refused(daemon, "tls", 3)
        # A valid one, in TLS 1.2.
        context.load_cert_chain(rank_files.cert_file, rank_files.key_file)
        with pytest.raises(OSError, match=r"(?i)version|alert|reset|eof"):
            say_hello(context, daemon.server.port)
        refused(daemon, "tls", 4)
        # No TLS.
        with pytest.raises(ControlError):
            connect(daemon, None)
        refused(daemon, "tls", 5)
        sock = raw_connection(daemon.server.port)
        sock.sendall(b"\x16\x03\x01" + bytes(2**16))
        assert is_closed(sock)
        refused(daemon, "tls", 6)


def say_hello(context: ssl.SSLContext, port: int) -> None:
    with context.wrap_socket(raw_connection(port), server_hostname="127.0.0.1") as sock:
        sock.sendall(b"FLEXD")
        assert sock.recv(1)


def test_a_false_daemon_is_refused_by_the_rank(
    daemon_files: TlsFiles, rank_files: TlsFiles, authority: Authority, other: Authority
) -> None:
    # Of another CA; and of the right one, but a rank's.
    for files in (other.issue("false", "127.0.0.1"), authority.issue("greedy", "greedy.test")):
        credentials = ChannelCredentials(None, files)
        with echo_daemon(credentials=credentials) as daemon, pytest.raises(AuthenticationError, match="VERIFY_FAILED"):
            connect(daemon, rank_files)
    with echo_daemon(credentials=ChannelCredentials(None, daemon_files)) as daemon:
        connect(daemon, dataclasses.replace(rank_files, server_name="flexd.example")).close()
        with pytest.raises(AuthenticationError, match="CERTIFICATE_VERIFY_FAILED"):
            connect(daemon, dataclasses.replace(rank_files, server_name="elsewhere.example"))
    with echo_daemon() as daemon, pytest.raises(ControlError):
        connect(daemon, rank_files)


def test_new_files_are_used_for_new_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CHECK_SECONDS", 0.0)
    authority = Authority(tmp_path)
    files, rank = authority.issue("daemon", "elsewhere.example"), authority.issue("rank")
    with echo_daemon(credentials=ChannelCredentials(None, files)) as daemon:
        with pytest.raises(AuthenticationError):
            connect(daemon, rank)
        authority.issue("daemon", "127.0.0.1")
        connect(daemon, rank).close()


def test_bad_new_files_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    files = Authority(tmp_path).issue("daemon")
    context = TlsContext(files, server_side=True, clock=lambda: now[0])
    first = context.current()
    files.cert_file.write_text("no PEM")
    assert context.current() is first
    now[0] += network.CHECK_SECONDS
    with caplog.at_level(logging.ERROR):
        assert context.current() is first
    assert "control.tls.cert_file" in caplog.text
    assert "stays in use" in caplog.text


@pytest.mark.parametrize("name", ["cert_file", "key_file", "ca_file"])
def test_an_unusable_file_is_named_with_its_key_path(tmp_path: Path, name: str) -> None:
    files = Authority(tmp_path).issue("daemon")
    for path in (tmp_path / "missing", tmp_path / "empty"):
        if path.name == "empty":
            path.write_text("")
        with pytest.raises(ConfigError, match=rf"control\.tls\.(cert|ca)_file: .*{path.name}"):
            TlsContext(dataclasses.replace(files, **{name: path}), server_side=True)
