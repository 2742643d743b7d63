"""A proven connection: frames in both directions, and the change of its session keys."""

from __future__ import annotations

import socket
import ssl
import time

from flexd.control.daemon.channel_types import Received
from flexd.control.daemon.queued_output import OutputTotal, PeerOutput
from flexd.control.daemon.unproven_connection import WOULD_BLOCK
from flexd.control.daemon.unread_events import UnreadEvents
from flexd.control.protocol.frames import SMALL_FRAME_BYTES, Frame, FrameKey, FrameKind, FrameReader, SealedPayload
from flexd.control.protocol.handshake import Session
from flexd.core.secrets import Secret, accepted_keys

_LARGE_READ_BYTES = 2**18
_PROOF_SECONDS = 1.0
"""A peer that proves keys more often is closed; an honest one waits ``PROVE_AGAIN_SECONDS``."""


class PeerClosedError(Exception):
    """The connection is to be closed. ``reason`` is a bounded label for metrics."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class ChannelPeer:
    """A peer, as the channel's thread sees it.

    Attributes:
        number: never used again.
        proven_key: of the shared secret, that the peer proved last.
        output: frames that wait for it.
        is_paused: it is not read until there is room for what it sends.
        is_deaf: it accepts no output any more.
        close_reason: it is closed once its output is sent; empty while it is not to be closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        session: Session,
        secret: Secret,
        unread: UnreadEvents,
        total: OutputTotal,
    ) -> None:
        self.sock = sock
        self.number = number
        self.proven_key = session.key
        self.output = PeerOutput(FrameKey(session.to_client), total)
        self.is_paused = False
        self.is_deaf = False
        self.close_reason = ""
        self.bytes_in = 0
        self._session = session
        self._next_session: Session | None = None
        self._secret = secret
        self._unread = unread
        self._reader = FrameReader(FrameKey(session.to_daemon))
        self._reserved = 0
        self._large_since = 0.0
        self._proof_at = -_PROOF_SECONDS

    @property
    def waits_for_large(self) -> bool:
        """True while a large frame waits for room that all peers share, and not for this peer's own."""
        return bool(self._reader.wanted) and self._unread.is_within_bound(self.number)

    def large_is_late(self, now: float, seconds: float) -> bool:
        """Return whether a large frame began more than ``seconds`` ago and is not complete."""
        return self._reader.large_bytes > 0 and now - self._large_since > seconds

    def read(self, is_contended: bool) -> None:
        """Read once without waiting, and add the frames that are complete to the unread ones, as far as there is room.

        Args:
            is_contended: another peer's large frame waits for room.

        Raises:
            PeerClosedError: disconnected, or not what a peer may send.
            FrameError, AuthenticationError: the same.
        """
        self._parse(is_contended)
        while not self.is_paused:
            if not self._receive():
                return
            self._parse(is_contended)
            if not (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending()):
                return

    def release(self) -> None:
        """Give back what is reserved, and drop the output."""
        self._unread.release(self.number, self._reserved)
        self._reserved = 0
        self.output.clear()

    def _receive(self) -> bool:
        target = self._reader.target
        try:
            if target:
                count = self.sock.recv_into(target[:_LARGE_READ_BYTES])
                self._reader.advance(count)
            else:
                data = self.sock.recv(SMALL_FRAME_BYTES)
                count = len(data)
                self._reader.feed(data)
        except WOULD_BLOCK:
            return False
        except OSError as error:
            raise PeerClosedError("disconnected") from error
        if count == 0:
            raise PeerClosedError("disconnected")
        self.bytes_in += count
        return True

    def _parse(self, is_contended: bool) -> None:
        self.is_paused = False
        while True:
            # Room for a large frame was reserved when it began.
            if not self._reserved and not self._unread.has_room(self.number, is_contended):
                self.is_paused = True
                return
            found = self._reader.next_frame()
            if found is None:
                break
            reserved, self._reserved = self._reserved, 0
            self._handle(*found, reserved)
        if self._reader.wanted:
            if is_contended or not self._unread.reserve(self.number, self._reader.wanted):
                self.is_paused = True
                return
            self._reserved = self._reader.wanted
            self._large_since = time.monotonic()
            self._reader.allocate()

    def _handle(self, kind: int, frame: Frame, reserved: int) -> None:
        if kind == FrameKind.DATA and not self.close_reason:
            event = Received(self.number, frame.message, frame.body)
            self._unread.add(event, len(frame.message) + len(frame.body), reserved)
            return
        self._unread.release(self.number, reserved)
        if kind == FrameKind.PROVE:
            now = time.monotonic()
            if now - self._proof_at < _PROOF_SECONDS:
                raise PeerClosedError("too_many_proofs")
            self._proof_at = now
            session = self._session.with_key(frame.message, accepted_keys(self._secret))
            if session is None:
                self.output.add(SealedPayload(b"", kind=FrameKind.NOT_PROVED))
            else:
                self.output.add(SealedPayload(b"", kind=FrameKind.PROVED))
                self.output.key.replace(session.to_client)
                self.proven_key = session.key
                self._next_session = session
        elif kind == FrameKind.SWITCHED and self._next_session is not None:
            self._session, self._next_session = self._next_session, None
            self._reader.key.replace(self._session.to_daemon)
