"""The connections of the control channel: unproven, read as far as the handshake needs, then with frames both ways."""

import socket
import ssl
import time
from collections import deque

from flexd.control.daemon.channel_events import EVENT_BYTES, Received, UnreadEvents
from flexd.control.protocol.handshake import HandshakeRefusedError, Session, Steps
from flexd.control.protocol.wire import (
    READ_BYTES,
    Body,
    FrameError,
    FrameKey,
    FrameKind,
    FrameReader,
    SealedPayload,
)

# Buffers of one system call: 16 frames of three.
_BUFFERS = 48
WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class OutputTotal:
    """Bytes queued for all peers; a payload counts once, however many peers it is queued for."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._uses: dict[SealedPayload, int] = {}

    def add(self, payload: SealedPayload) -> None:
        uses = self._uses.get(payload, 0)
        self._uses[payload] = uses + 1
        self.nbytes += EVENT_BYTES + (0 if uses else payload.nbytes)

    def remove(self, payload: SealedPayload) -> None:
        uses = self._uses.pop(payload) - 1
        if uses:
            self._uses[payload] = uses
        self.nbytes -= EVENT_BYTES + (0 if uses else payload.nbytes)


class PeerOutput:
    """The frames that wait for one peer, in order.

    Attributes:
        nbytes: of the frames not sent whole.
        progress_at: when the peer last accepted a byte, or the queue was empty.
    """

    def __init__(self, key: FrameKey, total: OutputTotal) -> None:
        self.key = key
        self.nbytes = 0
        self.progress_at = time.monotonic()
        self._total = total
        self._buffers: deque[tuple[Body, SealedPayload | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def add(self, payload: SealedPayload) -> None:
        """Tag and queue a frame."""
        if not self._buffers:
            self.progress_at = time.monotonic()
        self._buffers.append((payload.start, None))
        if payload.body:
            self._buffers.append((payload.body, None))
        self._buffers.append((self.key.tag(payload), payload))
        self._total.add(payload)
        self.nbytes += payload.nbytes + EVENT_BYTES

    def flush(self, sock: socket.socket) -> None:
        """Send what the socket accepts now. Raises OSError."""
        while self._buffers:
            try:
                count = self._send(sock)
            except WOULD_BLOCK:
                break
            if count == 0:
                break
            self._drop(count)
            self.progress_at = time.monotonic()

    def clear(self) -> None:
        """Drop all frames."""
        for _, payload in self._buffers:
            if payload is not None:
                self._total.remove(payload)
        self._buffers.clear()
        self.nbytes = 0

    def _send(self, sock: socket.socket) -> int:
        if isinstance(sock, ssl.SSLSocket):
            return sock.send(self._buffers[0][0])
        return sock.sendmsg([self._buffers[at][0] for at in range(min(_BUFFERS, len(self._buffers)))])

    def _drop(self, count: int) -> None:
        while count:
            buffer, payload = self._buffers[0]
            if count < len(buffer):
                self._buffers[0] = (memoryview(buffer)[count:], payload)
                return
            count -= len(buffer)
            self._buffers.popleft()
            if payload is not None:
                self._total.remove(payload)
                self.nbytes -= payload.nbytes + EVENT_BYTES


class UnprovenConnection:
    """An accepted connection in its handshake.

    Args:
        sock: not blocking; a TLS socket whose handshake is still to be made, or a plain one.

    Attributes:
        opened_at: monotonic seconds.
        wants_write: TLS waits until the socket can be written to.
    """

    def __init__(self, sock: socket.socket, address: str, steps: Steps) -> None:
        self.sock = sock
        self.address = address
        self.opened_at = time.monotonic()
        self.wants_write = False
        self.bytes_in = 0
        self._in_tls = isinstance(sock, ssl.SSLSocket)
        self._steps = steps
        self._received = b""
        _, self._needed = next(steps)

    def advance(self) -> Session | None:
        """Read and answer as far as possible without waiting; the session once the client has proven itself.

        Raises:
            HandshakeRefusedError: the connection is to be closed after ``reply``.
        """
        try:
            if not self._tls_done():
                return None
            while True:
                while len(self._received) < self._needed:
                    data = self.sock.recv(self._needed - len(self._received))
                    if not data:
                        raise HandshakeRefusedError("closed in the handshake", reason="disconnected")
                    self.bytes_in += len(data)
                    self._received += data
                data, self._received = self._received, b""
                output, self._needed = self._steps.send(data)
                if output:
                    self.send(output)
        except WOULD_BLOCK:
            return None
        except StopIteration as done:
            session: Session = done.value
            return session
        except ssl.SSLError as error:
            raise HandshakeRefusedError(f"TLS: {error.reason or error}", reason="tls") from error
        except OSError as error:
            raise HandshakeRefusedError(str(error), reason="disconnected") from error

    def send(self, output: bytes) -> None:
        """Send the few bytes of a step, which a new connection always has room for. Raises HandshakeRefusedError."""
        try:
            sent = self.sock.send(output)
        except OSError as error:
            raise HandshakeRefusedError(str(error), reason="disconnected") from error
        if sent < len(output):
            raise HandshakeRefusedError("does not read its handshake", reason="disconnected")

    def _tls_done(self) -> bool:
        if self._in_tls and isinstance(self.sock, ssl.SSLSocket):
            self.wants_write = False
            try:
                self.sock.do_handshake()
            except ssl.SSLWantWriteError:
                self.wants_write = True
                return False
            except ssl.SSLWantReadError:
                return False
            self._in_tls = False
        return True


class ChannelPeer:
    """A peer, as the channel's thread sees it.

    Attributes:
        number: never used again.
        proven_key: of the shared secret, that the peer has proven.
        output: frames that wait for it.
        is_paused: it is not read until there is room for what it sends.
        write_closed: it accepts no output any more.
        close_reason: it is closed once its output is sent; empty while it is not to be closed.
        partial_bytes: received bytes that are no whole frame yet, or wait for room.
    """

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        session: Session,
        unread: UnreadEvents,
        total: OutputTotal,
    ) -> None:
        self.sock = sock
        self.number = number
        self.proven_key = session.key
        self.output = PeerOutput(FrameKey(session.to_client), total)
        self.is_paused = False
        self.write_closed = False
        self.close_reason = ""
        self.bytes_in = 0
        self._unread = unread
        self._reader = FrameReader(FrameKey(session.to_daemon))
        self.partial_bytes = 0
        self._begun_at = 0.0

    def read(self) -> None:
        """Read once without waiting, and add the frames that are complete to the unread ones, as far as there is room.

        Raises:
            FrameError: disconnected, or not what a peer may send.
            AuthenticationError: a frame is not the one that the peer sent next.
        """
        self._parse()
        while not self.is_paused:
            try:
                data = self.sock.recv(READ_BYTES)
            except WOULD_BLOCK:
                return
            except OSError:
                data = b""
            if not data:
                raise FrameError("the peer has closed the connection", reason="disconnected")
            self._reader.feed(data)
            self.bytes_in += len(data)
            self._parse()
            if not (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending()):
                return

    def is_late(self, now: float, seconds: float) -> bool:
        """Return whether the frame under way began more than ``seconds`` ago; one that waits for room is not late."""
        return self.partial_bytes > 0 and not self.is_paused and now - self._begun_at > seconds

    def release(self) -> None:
        """Drop the output, and what is received of a frame."""
        self._count_partial(0)
        self.output.clear()

    def _parse(self) -> None:
        reader, unread, begins = self._reader, self._unread, not self.partial_bytes
        while (
            (nbytes := reader.whole_bytes)
            and unread.has_room(self.number, nbytes)
            and (found := reader.next_frame()) is not None
        ):
            begins, (kind, frame) = True, found
            if kind == FrameKind.DATA and not self.close_reason:
                event = Received(self.number, frame.message, frame.body)
                unread.add(event, len(frame.message) + len(frame.body))
        self.is_paused = nbytes > 0
        self._count_partial(reader.nbytes)
        if begins:
            self._begun_at = time.monotonic()

    def _count_partial(self, nbytes: int) -> None:
        self._unread.partial_bytes += nbytes - self.partial_bytes
        self.partial_bytes = nbytes
