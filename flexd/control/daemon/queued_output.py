"""Frames queued for the peers: tagged for each, their bytes shared and counted once."""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque

from flexd.control.daemon.channel_types import EVENT_BYTES
from flexd.control.protocol.frames import Body, FrameKey, SealedPayload

_BUFFERS = 48
"""Buffers of one system call: 16 frames of three."""
_RECORD_BYTES = 2**14


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

    def flush(self, sock: socket.socket) -> int:
        """Send what the socket accepts now and return the number of bytes. Raises OSError."""
        sent = 0
        while self._buffers:
            try:
                count = self._send(sock)
            except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            if count == 0:
                break
            sent += count
            self._drop(count)
        if sent:
            self.progress_at = time.monotonic()
        return sent

    def clear(self) -> None:
        """Drop all frames."""
        for _, payload in self._buffers:
            if payload is not None:
                self._total.remove(payload)
        self._buffers.clear()
        self.nbytes = 0

    def _send(self, sock: socket.socket) -> int:
        if isinstance(sock, ssl.SSLSocket):
            return sock.send(self._first_record())
        return sock.sendmsg([self._buffers[at][0] for at in range(min(_BUFFERS, len(self._buffers)))])

    def _first_record(self) -> Body:
        """Join short buffers: each call makes a TLS record of its own. A retry finds the same bytes, or more."""
        first: list[Body] = []
        nbytes = 0
        for buffer, _ in self._buffers:
            if first and nbytes + len(buffer) > _RECORD_BYTES:
                break
            first.append(buffer)
            nbytes += len(buffer)
        return first[0] if len(first) == 1 else b"".join(first)

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
