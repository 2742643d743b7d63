"""The frames of a proven connection: a message with an optional body, and a tag that only the two ends can make.

::

    u32 length of message and body | u8 kind | u32 length of message | message | body | 16 bytes of tag

The tag is HMAC-SHA256 (truncated) by the direction's session key over the number of the frame and the SHA-256 of
everything before the tag. So a frame that was changed, cut, repeated, moved or taken from the other direction is
refused, and a frame for many peers is hashed once.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from flexd.core.errors import AuthenticationError, ControlError

MAX_MESSAGE_BYTES = 2**18
"""Largest message of a frame."""
MAX_BODY_BYTES = 2**20
"""Largest body of a frame; a longer one is sent as several frames, which the messages number."""
TAG_BYTES = 16
HEAD = struct.Struct(">IBI")
MAX_FRAME_BYTES = HEAD.size + MAX_MESSAGE_BYTES + MAX_BODY_BYTES + TAG_BYTES

_SEQUENCE = struct.Struct(">Q")

Body = bytes | memoryview


READ_BYTES = 2**16
"""Bytes read from a socket at a time."""


class FrameKind(IntEnum):
    """Purpose of a frame. An authentic frame of another kind is ignored: a later version may have sent it.

    Attributes:
        DATA: a message of the layer above.
        CLOSE: the daemon closes the connection; the message is the reason.
    """

    DATA = 0
    CLOSE = 1


@dataclass(frozen=True, slots=True)
class Frame:
    """A received message with its body."""

    message: bytes
    body: Body = b""


class FrameError(ControlError):
    """A frame breaks the format. ``reason`` is a bounded label for metrics."""

    def __init__(self, message: str, *, reason: str) -> None:
        self.reason = reason
        super().__init__(message, remedy="run the same flexd version on both sides")


def _parse_head(data: Body) -> tuple[int, int, int]:
    """Return length of the whole frame, kind and length of the message, within their bounds but not yet authenticated.

    Raises:
        FrameError: a length is over its bound.
    """
    length, kind, message_length = HEAD.unpack(data[: HEAD.size])
    if message_length > length:
        raise FrameError(f"a frame of {length} bytes with a message of {message_length}", reason="malformed")
    if message_length > MAX_MESSAGE_BYTES or length - message_length > MAX_BODY_BYTES:
        raise FrameError(
            f"a frame with a message of {message_length} and a body of {length - message_length} bytes",
            reason="oversized",
        )
    return HEAD.size + length + TAG_BYTES, kind, message_length


class SealedPayload:
    """All of a frame but its tag, hashed once for any number of peers, which share it.

    Attributes:
        start: head and message.
        body: not copied.
        nbytes: length of the whole frame.

    Raises:
        ControlError: message or body is too long.
    """

    __slots__ = ("body", "digest", "nbytes", "start")

    def __init__(self, message: bytes, body: Body = b"", kind: FrameKind = FrameKind.DATA) -> None:
        body_bytes = memoryview(body).nbytes
        if len(message) > MAX_MESSAGE_BYTES or body_bytes > MAX_BODY_BYTES:
            raise ControlError(
                f"a message of {len(message)} bytes with a body of {body_bytes}",
                remedy=f"send at most {MAX_MESSAGE_BYTES} and {MAX_BODY_BYTES} in one frame",
            )
        self.start = HEAD.pack(len(message) + body_bytes, kind, len(message)) + message
        self.body = body if isinstance(body, bytes) else memoryview(body).cast("B")
        digest = hashlib.sha256(self.start)
        digest.update(body)
        self.digest = digest.digest()
        self.nbytes = HEAD.size + len(message) + body_bytes + TAG_BYTES


class FrameKey:
    """The session key of one direction, and the number of its next frame."""

    __slots__ = ("_key", "_sequence")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def tag(self, payload: SealedPayload) -> bytes:
        """Return the tag of the next frame to send."""
        return self._next_tag(payload.digest)

    def verify(self, content: Body, tag: Body) -> None:
        """Verify the next received frame, of which ``content`` is all before the tag.

        Raises:
            AuthenticationError: it is not the one that the peer sent next.
        """
        if not hmac.compare_digest(self._next_tag(hashlib.sha256(content).digest()), tag):
            raise AuthenticationError(
                "a frame of the control channel is not the one that was sent",
                remedy="look for a fault or an intruder on the control network",
            )

    def _next_tag(self, digest: bytes) -> bytes:
        text = _SEQUENCE.pack(self._sequence) + digest
        self._sequence += 1
        return hmac.digest(self._key, text, "sha256")[:TAG_BYTES]


class FrameReader:
    """Splits the bytes of one direction of a connection into frames and verifies them.

    Attributes:
        key: of the direction.
    """

    def __init__(self, key: FrameKey) -> None:
        self.key = key
        self._data = bytearray()

    @property
    def nbytes(self) -> int:
        """Bytes that were fed and not returned yet."""
        return len(self._data)

    @property
    def whole_bytes(self) -> int:
        """Length of the next frame; 0 before all of it is there. Raises FrameError: it breaks the format."""
        if len(self._data) < HEAD.size:
            return 0
        nbytes, _, _ = _parse_head(bytes(self._data[: HEAD.size]))
        return nbytes if len(self._data) >= nbytes else 0

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._data += data

    def next_frame(self) -> tuple[int, Frame] | None:
        """Return kind and content of the next whole frame; None before all of it is there.

        Raises:
            FrameError: it breaks the format.
            AuthenticationError: it is not the one that the peer sent next.
        """
        nbytes = self.whole_bytes
        if not nbytes:
            return None
        frame = memoryview(bytes(self._data[:nbytes]))
        del self._data[:nbytes]
        _, kind, message_length = _parse_head(frame)
        content, message_end = frame[:-TAG_BYTES], HEAD.size + message_length
        self.key.verify(content, frame[-TAG_BYTES:])
        return kind, Frame(bytes(content[HEAD.size : message_end]), content[message_end:])
