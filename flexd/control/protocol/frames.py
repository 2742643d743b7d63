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


class FrameKind(IntEnum):
    """Purpose of a frame. An authentic frame of another kind is ignored: a later version may have sent it.

    Attributes:
        DATA: a message of the layer above.
        PROVE: the client proves another key of the shared secret, of which both ends derive new session keys.
        PROVED: the daemon accepts the key of ``PROVE``.
        NOT_PROVED: the daemon does not have the key of ``PROVE``; the session keys stay.
        CLOSE: the daemon closes the connection; the message is the reason.
    """

    DATA = 0
    PROVE = 1
    PROVED = 2
    NOT_PROVED = 3
    CLOSE = 4


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


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The fixed-size start of a frame, within its bounds but not yet authenticated."""

    length: int
    kind: int
    message_length: int

    @staticmethod
    def parse(data: Body) -> FrameHead:
        """Parse ``HEAD.size`` bytes. Raises FrameError: a length is over its bound."""
        length, kind, message_length = HEAD.unpack(data)
        if message_length > length:
            raise FrameError(f"a frame of {length} bytes with a message of {message_length}", reason="malformed")
        if message_length > MAX_MESSAGE_BYTES or length - message_length > MAX_BODY_BYTES:
            raise FrameError(
                f"a frame with a message of {message_length} and a body of {length - message_length} bytes",
                reason="oversized",
            )
        return FrameHead(length, kind, message_length)


class SealedPayload:
    """All of a frame but its tag, hashed once for any number of peers. Message and body are not copied.

    Raises:
        ControlError: message or body is too long.
    """

    __slots__ = ("body", "digest", "head", "message", "nbytes")

    def __init__(self, message: bytes, body: Body = b"", kind: FrameKind = FrameKind.DATA) -> None:
        if len(message) > MAX_MESSAGE_BYTES or len(body) > MAX_BODY_BYTES:
            raise ControlError(
                f"a message of {len(message)} bytes with a body of {len(body)}",
                remedy=f"send at most {MAX_MESSAGE_BYTES} and {MAX_BODY_BYTES} in one frame",
            )
        self.message = message
        self.body = body
        self.head = HEAD.pack(len(message) + len(body), kind, len(message))
        digest = hashlib.sha256(self.head)
        digest.update(message)
        digest.update(body)
        self.digest = digest.digest()
        self.nbytes = HEAD.size + len(message) + len(body) + TAG_BYTES


class FrameKey:
    """The session key of one direction, and the number of its next frame."""

    __slots__ = ("_key", "_sequence")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def tag(self, payload: SealedPayload) -> bytes:
        """Return the tag of the next frame to send."""
        return self._next_tag(payload.digest)

    def verify(self, head: Body, payload: Body, tag: Body) -> None:
        """Verify the next received frame. Raises AuthenticationError: it is not the one that the peer sent next."""
        digest = hashlib.sha256(head)
        digest.update(payload)
        if not hmac.compare_digest(self._next_tag(digest.digest()), bytes(tag)):
            raise AuthenticationError(
                "a frame of the control channel is not the one that was sent",
                remedy="look for a fault or an intruder on the control network",
            )

    def replace(self, key: bytes) -> None:
        """Use another key from the next frame on; the numbers go on."""
        self._key = key

    def _next_tag(self, digest: bytes) -> bytes:
        text = _SEQUENCE.pack(self._sequence) + digest
        self._sequence += 1
        return hmac.digest(self._key, text, "sha256")[:TAG_BYTES]
