"""A connection that has not proven itself: it is read as far as the handshake needs, and no further."""

from __future__ import annotations

import socket
import ssl
import time

from flexd.control.protocol.handshake import HandshakeRefusedError, Session, Steps

WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


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
        self.bytes_out = 0
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
        self.bytes_out += sent
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
