"""Addresses, versions, keys and certificates: both ends agree if they share a secret, and in no other case."""

import dataclasses
import re
import ssl
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.protocol import handshake
from flexd.control.protocol.handshake import (
    MAX_CLIENT_BYTES,
    OWN,
    PROOF_BYTES,
    ChannelCredentials,
    HandshakeRefusedError,
    HandshakeStatus,
    Session,
    Steps,
    TlsContext,
    TlsFiles,
    Versions,
    client_steps,
    parse_address,
    server_steps,
)
from flexd.control.protocol.wire import MAX_BODY_BYTES
from flexd.core.errors import AuthenticationError, ConfigError, ControlError, IncompatibleError
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

OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32


class End:
    """One generator with what it has sent, and its result or error."""

    def __init__(self, steps: Steps, verdict: bool = False) -> None:
        self.steps = steps
        self.verdict = verdict
        self.sent: list[bytes] = []
        self.pending = b""
        self.session: Session | None = None
        self.error: Exception | None = None
        self._run(None)

    def feed(self, data: bytes) -> None:
        self.pending += data
        while self.session is None and self.error is None and len(self.pending) >= self.needed:
            data, self.pending = self.pending[: self.needed], self.pending[self.needed :]
            self._run(data)

    def _run(self, data: bytes | None) -> None:
        try:
            output, self.needed = next(self.steps) if data is None else self.steps.send(data)
            if output:
                self.sent.append(output)
        except StopIteration as done:
            self.session = done.value
            if self.verdict:
                self.sent.append(done.value.verdict(HandshakeStatus.OK))
        except HandshakeRefusedError as error:
            self.error = error
            self.sent.append(error.reply)
        except ControlError as error:
            self.error = error


def meet(client: Steps, server: Steps) -> tuple[End, End]:
    ends = End(client), End(server, verdict=True)
    seen = [0, 0]
    for _ in range(10):
        for own, other in ((0, 1), (1, 0)):
            while seen[own] < len(ends[own].sent):
                ends[other].feed(ends[own].sent[seen[own]])
                seen[own] += 1
    return ends


@pytest.mark.parametrize(
    ("client_keys", "server_keys", "proven"),
    [
        ((OLD,), (OLD,), OLD),
        ((OLD,), (OLD, NEW), OLD),
        ((OLD, NEW), (NEW, OLD), OLD),
        ((NEW, OLD), (OLD, NEW), NEW),
        ((NEW, OLD), (NEW,), NEW),
        ((OLD, NEW), (NEW,), NEW),
        ((b"",), (b"",), b""),
    ],
)
def test_both_ends_agree(client_keys: tuple[bytes, ...], server_keys: tuple[bytes, ...], proven: bytes) -> None:
    client, server = meet(client_steps(OWN, client_keys), server_steps(OWN, server_keys))
    assert client.session.key == proven
    assert vars(client.session) == vars(server.session)
    assert client.session.to_daemon != client.session.to_client
    assert sum(map(len, client.sent)) <= MAX_CLIENT_BYTES
    assert proven.hex() not in repr(client.session) or not proven


@pytest.mark.parametrize(("client_keys", "server_keys"), [((OTHER,), (OLD, NEW)), ((OLD,), (b"",)), ((b"",), (OLD,))])
def test_another_secret_is_refused_at_both_ends(client_keys: tuple[bytes, ...], server_keys: tuple[bytes, ...]) -> None:
    client, server = meet(client_steps(OWN, client_keys), server_steps(OWN, server_keys))
    assert isinstance(client.error, AuthenticationError)
    assert isinstance(server.error, HandshakeRefusedError)
    assert server.error.reason == "wrong_secret"
    # The client has not shown anything that its key made.
    assert client.sent[-1] == bytes(PROOF_BYTES)


def test_the_versions_are_negotiated_and_told() -> None:
    client, server = meet(client_steps(Versions(1, 3), (OLD,)), server_steps(Versions(2, 4), (OLD,)))
    assert [end.session and end.session.version for end in (client, server)] == [3, 3]
    client, server = meet(client_steps(Versions(1, 1), (OLD,)), server_steps(Versions(3, 4), (OLD,)))
    assert isinstance(client.error, IncompatibleError)
    assert re.search("version 1 .* versions 3 to 4", str(client.error))
    assert isinstance(server.error, HandshakeRefusedError)
    assert server.error.reason == "version"


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_one_bit_flipped_on_the_way_is_noticed(data: st.DataObject) -> None:
    """Also of versions: nobody between the ends can choose the version."""
    offer = Versions(1, 2)
    client, server = End(client_steps(offer, (OLD,))), End(server_steps(offer, (OLD, NEW)), verdict=True)
    # One of four steps; the last 32 bytes of the server's first are the proof of a key that the client does not have.
    step = data.draw(st.integers(0, 3))
    for at, (sender, receiver) in enumerate(((client, server), (server, client), (client, server), (server, client))):
        if len(sender.sent) <= at // 2:
            break
        sent = bytearray(sender.sent[at // 2])
        if at == step:
            bit = data.draw(st.integers(0, 8 * (len(sent) - (32 if at == 1 else 0)) - 1))
            sent[bit // 8] ^= 1 << bit % 8
        receiver.feed(bytes(sent))
    assert client.session is None


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
    monkeypatch.setattr(handshake, "CHECK_SECONDS", 0.0)
    authority = Authority(tmp_path)
    files, rank = authority.issue("daemon", "elsewhere.example"), authority.issue("rank")
    with echo_daemon(credentials=ChannelCredentials(None, files)) as daemon:
        with pytest.raises(AuthenticationError):
            connect(daemon, rank)
        authority.issue("daemon", "127.0.0.1")
        connect(daemon, rank).close()


@pytest.mark.parametrize("name", ["cert_file", "key_file", "ca_file"])
def test_an_unusable_file_is_named_with_its_key_path(tmp_path: Path, name: str) -> None:
    files = Authority(tmp_path).issue("daemon")
    for path in (tmp_path / "missing", tmp_path / "empty"):
        if path.name == "empty":
            path.write_text("")
        with pytest.raises(ConfigError, match=rf"control\.tls\.(cert|ca)_file: .*{path.name}"):
            TlsContext(dataclasses.replace(files, **{name: path}), server_side=True)
