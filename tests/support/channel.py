"""A real channel server with an honest peer, and raw sockets that do to it what no ``ChannelClient`` does."""

import contextlib
import socket
import threading
from collections.abc import Iterator

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.daemon.channel_events import PEER_SHARE_BYTES, ChannelOptions, Closed, Event, Received
from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.protocol.handshake import MAX_CLIENT_BYTES, OWN, ChannelCredentials, Session, Steps, client_steps
from flexd.control.protocol.wire import MAX_FRAME_BYTES, READ_BYTES, FrameKey, SealedPayload
from tests.support.until import until

SECRET = b"0123456789abcdef0123456789abcdef"
CREDENTIALS = ChannelCredentials(SECRET)
DEADLINE_SECONDS = 20.0


class EchoDaemon:
    """A server whose frames are answered with themselves, by a thread in the coordinator's place.

    Attributes:
        events: all but the frames that were answered.
        received: number of those.
    """

    def __init__(self, options: ChannelOptions, credentials: ChannelCredentials) -> None:
        self.server = ChannelServer(options, credentials)
        self.events: list[Event] = []
        self.received = 0
        self._drains = threading.Event()
        self._drains.set()
        self._is_paused = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.server.start()
        self._thread.start()

    def closed(self) -> list[Closed]:
        return [event for event in self.events if isinstance(event, Closed)]

    def pause(self) -> None:
        """Receive nothing until ``resume``."""
        self._is_paused.clear()
        self._drains.clear()
        self.server.unread.wake()
        assert self._is_paused.wait(DEADLINE_SECONDS)

    def resume(self) -> None:
        self._drains.set()

    def stop(self) -> None:
        self._stopping.set()
        self.resume()
        self.server.unread.wake()
        self._thread.join(DEADLINE_SECONDS)
        assert self.server.stop(DEADLINE_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._drains.is_set():
                self._is_paused.set()
                self._drains.wait()
            for event in self.server.unread.receive(16, 0.5):
                if isinstance(event, Received):
                    self.received += 1
                    self.server.send([event.peer], event.message, event.body)
                else:
                    self.events.append(event)


@contextlib.contextmanager
def echo_daemon(
    options: ChannelOptions | None = None, credentials: ChannelCredentials = CREDENTIALS
) -> Iterator[EchoDaemon]:
    daemon = EchoDaemon(options or ChannelOptions(), credentials)
    try:
        yield daemon
    finally:
        daemon.stop()


class HonestPeer:
    """A client in a loop of round trips, one large one among them; each must return within the deadline."""

    def __init__(self, port: int, credentials: ChannelCredentials = CREDENTIALS) -> None:
        self.client = ChannelClient.connect("127.0.0.1", port, credentials, DEADLINE_SECONDS)
        self.trips = 0
        self.error: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def goes_on(self) -> None:
        """Wait for ten round trips more."""
        before = self.trips
        until(lambda: self.error or self.trips >= before + 10, DEADLINE_SECONDS, "the honest peer stands still")
        assert self.error is None, self.error

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_SECONDS)
        self.client.close()
        assert self.error is None, self.error

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                round_trip(self.client, b"trip %d" % self.trips, bytes(100_000 if self.trips % 8 == 0 else 10))
                self.trips += 1
                self._stopping.wait(0.002)
        except Exception as error:
            self.error = error


@contextlib.contextmanager
def honest_peer(daemon: EchoDaemon, credentials: ChannelCredentials = CREDENTIALS) -> Iterator[HonestPeer]:
    """Check at the end that the peer has never been stopped, and that a new one is let in."""
    peer = HonestPeer(daemon.server.port, credentials)
    try:
        peer.goes_on()
        yield peer
        peer.goes_on()
        newcomer = ChannelClient.connect("127.0.0.1", daemon.server.port, credentials, DEADLINE_SECONDS)
        round_trip(newcomer, b"new", b"")
        newcomer.close()
    finally:
        peer.stop()


def round_trip(client: ChannelClient, message: bytes, body: bytes) -> None:
    client.send(message, body)
    frame = client.receive(DEADLINE_SECONDS)
    assert frame is not None, f"no answer to {message!r} in {DEADLINE_SECONDS} s"
    assert (frame.message, bytes(frame.body)) == (message, body)


def raw_connection(port: int, receive_buffer_bytes: int | None = None) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(DEADLINE_SECONDS)
    if receive_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    sock.connect(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Read to the end of the connection; False if it stays open for the socket's timeout."""
    try:
        while sock.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


class RawPeer:
    """A proven connection whose frames the test makes, breaks and sends itself.

    Attributes:
        sent: bytes of each step of the handshake that were sent.
    """

    def __init__(self, port: int, secret: bytes = SECRET, receive_buffer_bytes: int | None = None) -> None:
        self.sock = raw_connection(port, receive_buffer_bytes)
        self.sent: list[bytes] = []
        self.session = shake_hands(self.sock, client_steps(OWN, (secret,)), self.sent)
        self.key = FrameKey(self.session.to_daemon)

    def frame(self, message: bytes, body: bytes = b"") -> bytes:
        """Return the next frame as it travels."""
        payload = SealedPayload(message, body)
        return payload.start + bytes(payload.body) + self.key.tag(payload)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)


def shake_hands(sock: socket.socket, steps: Steps, sent: list[bytes] | None = None) -> Session:
    """Take all steps of one end of a handshake; ``sent`` receives the bytes of each that sends some."""
    try:
        output, needed = next(steps)
        while True:
            sock.sendall(output)
            if output and sent is not None:
                sent.append(output)
            data = b""
            while len(data) < needed:
                more = sock.recv(needed - len(data))
                assert more, "refused"
                data += more
            output, needed = steps.send(data)
    except StopIteration as done:
        return done.value


def memory_bound_bytes(options: ChannelOptions, with_tls: bool = False) -> int:
    """Return the most memory that connections may use, whatever their other ends send: 8 KiB of each and 128 KiB of
    OpenSSL, beside their buffers. One frame may be added to each total before its bound takes effect."""
    connection = 2**13 + (2**17 if with_tls else 0)
    totals = options.unread_bytes + options.partial_bytes + options.queued_bytes + 2 * MAX_FRAME_BYTES + READ_BYTES
    unproven = options.max_unproven * (connection + MAX_CLIENT_BYTES)
    return unproven + options.max_peers * (connection + PEER_SHARE_BYTES) + totals


def fill(sock: socket.socket, data: bytes) -> int:
    """Send as much as is accepted without a pause of 50 ms, and return the number of bytes."""
    sock.settimeout(0.05)
    sent = 0
    with contextlib.suppress(TimeoutError, ConnectionError):
        while sent < len(data):
            sent += sock.send(data[sent : sent + 2**18])
    return sent
