"""The ranks' end of the control channel: one connection to the daemon, used by one thread, with deadlines."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time

from flexd.control.protocol.handshake import OWN, ChannelCredentials, Session, Steps, TlsContext, client_steps
from flexd.control.protocol.wire import (
    READ_BYTES,
    Body,
    Frame,
    FrameError,
    FrameKey,
    FrameKind,
    FrameReader,
    SealedPayload,
)
from flexd.core.errors import AuthenticationError, ControlError
from flexd.core.secrets import accepted_keys

_CLOSED = "the daemon has closed the connection"


class ChannelClient:
    """A proven connection to the daemon. All but ``wake`` is for one thread.

    Args:
        sock: connected, and through the handshake.

    Attributes:
        local_address: this end's address of the connection.
    """

    def __init__(self, sock: socket.socket, session: Session, timeout_seconds: float) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._timeout = timeout_seconds
        self.local_address = str(sock.getsockname()[0])
        self._sealing = FrameKey(session.to_daemon)
        self._reader = FrameReader(FrameKey(session.to_client))
        self._woken = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    @staticmethod
    def connect(host: str, port: int, credentials: ChannelCredentials, timeout_seconds: float) -> ChannelClient:
        """Connect and prove, within the timeout.

        Raises:
            ControlError: unreachable, no answer in time, or the daemon has too many connections.
            AuthenticationError: the two ends do not have the same secret, or a certificate is not valid.
            IncompatibleError: no common protocol version.
            ConfigError: a certificate file cannot be read.
        """
        deadline = time.monotonic() + timeout_seconds
        where = f"{host}:{port}"
        try:
            sock = socket.create_connection((host, port), timeout=timeout_seconds)
        except OSError as error:
            raise ControlError(f"no daemon at {where}: {error}", remedy="is it running? check the address") from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if credentials.tls is not None:
                context = TlsContext(credentials.tls, server_side=False).current()
                sock.settimeout(_remaining(deadline))
                sock = context.wrap_socket(sock, server_hostname=credentials.tls.server_name or host)
            session = _prove(sock, client_steps(OWN, accepted_keys(credentials.secret)), deadline)
            return ChannelClient(sock, session, timeout_seconds)
        except BaseException as error:
            sock.close()
            if isinstance(error, TimeoutError):
                raise ControlError(f"the daemon at {where} accepts connections but does not answer") from error
            if isinstance(error, ssl.SSLError):
                raise AuthenticationError(
                    f"TLS with {where}: {error.reason or error}",
                    remedy="give both sides certificates of one CA, the daemon's for the name that the ranks use",
                ) from error
            if isinstance(error, OSError):
                raise ControlError(f"{where}: {error}") from error
            raise

    def send(self, message: bytes, body: Body = b"") -> None:
        """Send one frame; does not receive meanwhile.

        Raises:
            ControlError: closed by the daemon, or not sent within the timeout (each record of TLS). The connection
                cannot be used any more.
        """
        payload = SealedPayload(message, body)
        try:
            self._socket.settimeout(self._timeout)
            self._socket.sendall(b"".join([payload.start, payload.body, self._sealing.tag(payload)]))
            self._socket.settimeout(0.0)
        except OSError as error:
            self._drop()
            if isinstance(error, TimeoutError):
                text = f"the daemon does not read: a frame was not sent in {self._timeout:g} s"
                raise ControlError(text) from error
            raise ControlError(f"{_CLOSED}: {error}") from error

    def receive(self, timeout_seconds: float) -> Frame | None:
        """Return the next frame; None after the timeout, or at once after ``wake``.

        Raises:
            ControlError: the connection is closed; the text has the daemon's reason, if it gave one.
            AuthenticationError: a frame is not authentic.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            if self._woken:
                self._woken = False
                with contextlib.suppress(BlockingIOError):
                    while self._wake_reader.recv(4096):
                        pass
                return None
            try:
                found = self._reader.next_frame()
            except (FrameError, AuthenticationError):
                self._drop()
                raise
            if found is not None:
                kind, frame = found
                if kind == FrameKind.DATA:
                    return frame
                if kind == FrameKind.CLOSE:
                    self._drop()
                    raise ControlError(f"{_CLOSED}: {frame.message[:200].decode(errors='replace')}")
                continue
            if not self._read_available():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._wait(remaining)

    def wake(self) -> None:
        """Let the running call of ``receive``, or else the next one, return None at once. From any thread."""
        self._woken = True
        # An error means: full of wakes that have not been seen yet, or closed.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def close(self) -> None:
        """Close the connection; idempotent. What was sent before arrives, if the daemon reads it within a second."""
        if self._socket.fileno() >= 0:
            # A close with frames unread would reset the connection, and drop what the daemon has not read yet.
            deadline = time.monotonic() + 1.0
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
                while time.monotonic() < deadline:
                    self._wait(deadline - time.monotonic(), wakeable=False)
                    if not socket.socket.recv(self._socket, READ_BYTES):
                        break
        self._drop()

    def _drop(self) -> None:
        """Close the connection after a failure."""
        for sock in (self._socket, self._wake_reader, self._wake_writer):
            sock.close()

    def _read_available(self) -> bool:
        """Read once, without waiting; False if nothing was there."""
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            self._drop()
            raise ControlError(f"{_CLOSED}: {error}") from error
        if not data:
            self._drop()
            raise ControlError(_CLOSED)
        self._reader.feed(data)
        return True

    def _wait(self, seconds: float, wakeable: bool = True) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if wakeable:
            poll.register(self._wake_reader, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)


def _prove(sock: socket.socket, steps: Steps, deadline: float) -> Session:
    try:
        output, needed = next(steps)
        while True:
            sock.settimeout(_remaining(deadline))
            sock.sendall(output)
            output, needed = steps.send(_read_exactly(sock, needed, deadline))
    except StopIteration as done:
        session: Session = done.value
        return session


def _read_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(_remaining(deadline))
        more = sock.recv(count - len(data))
        if not more:
            raise ControlError(
                f"{_CLOSED} during the handshake", remedy="see flexd_control_refused_connections_total for its reason"
            )
        data += more
    return data


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
