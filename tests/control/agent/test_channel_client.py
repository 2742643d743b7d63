"""A rank's end of the channel: every wait has a deadline or is woken, and every failure is named."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.daemon.channel_events import ChannelOptions, Opened
from flexd.control.protocol.handshake import OWN, ChannelCredentials, HandshakeStatus, Session, server_steps
from flexd.control.protocol.wire import MAX_BODY_BYTES, FrameKey, SealedPayload
from flexd.core.errors import AuthenticationError, ControlError
from tests.support.channel import (
    CREDENTIALS,
    DEADLINE_SECONDS,
    SECRET,
    EchoDaemon,
    echo_daemon,
    round_trip,
    shake_hands,
)
from tests.support.until import until


@pytest.fixture
def daemon() -> Iterator[EchoDaemon]:
    with echo_daemon() as daemon:
        yield daemon


def connect(port: int, credentials: ChannelCredentials = CREDENTIALS, timeout_seconds: float = 10.0) -> ChannelClient:
    return ChannelClient.connect("127.0.0.1", port, credentials, timeout_seconds)


@contextlib.contextmanager
def false_daemon(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Accept one connection and do with it what no flexd daemon does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with listener.accept()[0] as sock, contextlib.suppress(OSError):
                serve(sock)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(DEADLINE_SECONDS)


def accept_client(sock: socket.socket) -> Session:
    session = shake_hands(sock, server_steps(OWN, (SECRET,)))
    sock.sendall(session.verdict(HandshakeStatus.OK))
    return session


def test_frames_of_every_size_come_back(daemon: EchoDaemon) -> None:
    client = connect(daemon.server.port)
    for size in (0, 1, 8_000, 8_192, 100_000, MAX_BODY_BYTES):
        round_trip(client, b"size %d" % size, bytes(size))
    assert client.local_address == "127.0.0.1"
    assert daemon.events == [Opened(1)]


def test_a_receive_ends_at_its_timeout_or_when_it_is_woken(daemon: EchoDaemon) -> None:
    client = connect(daemon.server.port)
    assert client.receive(0.0) is None
    assert client.receive(0.01) is None
    client.wake()
    client.wake()
    assert client.receive(60.0) is None
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(client.receive(60.0)))
    thread.start()
    client.wake()
    thread.join(DEADLINE_SECONDS)
    assert found == [None]
    round_trip(client, b"after", b"")


def test_the_daemons_reason_for_a_close_is_told(daemon: EchoDaemon) -> None:
    client = connect(daemon.server.port)
    round_trip(client, b"a", b"")
    daemon.server.close(1, "replaced by another process")
    with pytest.raises(ControlError, match="has closed the connection: replaced by another process"):
        client.receive(DEADLINE_SECONDS)
    for use in (lambda: client.send(b"b"), lambda: client.receive(1.0)):
        with pytest.raises(ControlError, match="closed"):
            use()
    client.wake()
    client.close()


def test_what_was_sent_before_a_close_arrives() -> None:
    """Also what was still on its way, and while the daemon's frames are unread here."""
    with echo_daemon(ChannelOptions(peer_unread_bytes=2**17)) as daemon:
        client = connect(daemon.server.port)
        for _ in range(60):
            client.send(b"last", bytes(50_000))
        client.close()
        until(lambda: daemon.closed(), DEADLINE_SECONDS)
        assert daemon.received == 60


def test_what_was_sent_before_the_end_of_the_process_arrives() -> None:
    """The daemon finds that it cannot send any more before it has read everything."""
    with echo_daemon(ChannelOptions(peer_unread_bytes=2**15)) as daemon:
        client = connect(daemon.server.port)
        until(lambda: daemon.events, DEADLINE_SECONDS)
        daemon.pause()
        for _ in range(20):
            client.send(b"last", bytes(5_000))
        client._drop()
        daemon.resume()
        until(lambda: daemon.closed(), DEADLINE_SECONDS)
        assert daemon.received == 20


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no flexd daemon answers there"),
        (b"", "has closed the connection during the handshake"),
        (b"FLEXD\r\n\0\xff\xff", "no flexd daemon answers there: a hello of 65535 bytes"),
    ],
)
def test_something_else_listens_there(answer: bytes, error: str) -> None:
    def serve(sock: socket.socket) -> None:
        sock.recv(100)
        sock.sendall(answer)

    with false_daemon(serve) as port, pytest.raises(ControlError, match=error):
        connect(port)


@pytest.mark.parametrize("damage", ["flip", "repeat", "mirror", "unsigned"])
def test_a_frame_that_the_daemon_did_not_send_is_refused(damage: str) -> None:
    def serve(sock: socket.socket) -> None:
        session = accept_client(sock)
        key = FrameKey(session.to_daemon if damage == "mirror" else session.to_client)
        payload = SealedPayload(b"chunk")
        frame = payload.start + key.tag(payload)
        if damage == "flip":
            frame = frame[:10] + bytes([frame[10] ^ 1]) + frame[11:]
        if damage == "unsigned":
            frame = payload.start + bytes(16)
        sock.sendall(frame * (2 if damage == "repeat" else 1))

    with false_daemon(serve) as port:
        client = connect(port)
        if damage == "repeat":
            assert client.receive(DEADLINE_SECONDS)
        with pytest.raises(AuthenticationError, match="not the one that was sent"):
            client.receive(DEADLINE_SECONDS)


def test_a_daemon_that_does_not_read_fails_the_send() -> None:
    done = threading.Event()

    def serve(sock: socket.socket) -> None:
        accept_client(sock)
        done.wait()

    with false_daemon(serve) as port:
        client = connect(port, timeout_seconds=0.5)
        with pytest.raises(ControlError, match="does not read"):
            list(map(client.send, [b"more"] * 100, [bytes(MAX_BODY_BYTES)] * 100))
        done.set()
