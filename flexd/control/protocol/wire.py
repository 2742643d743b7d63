"""Frames of bytes over a proven connection, and dataclasses as JSON in them.

A frame is a message with an optional body, and a tag that only the two ends can make.

::

    u32 length of message and body | u8 kind | u32 length of message | message | body | 16 bytes of tag

The tag is HMAC-SHA256 (truncated) by the direction's session key over the number of the frame and the SHA-256 of
everything before the tag. So a frame that was changed, cut, repeated, moved or taken from the other direction is
refused, and a frame for many peers is hashed once.

A message is a dataclass as JSON, checked field by field. A field states its bounds in its type (``flexd.core.bounds``).
``build`` refuses a value outside of them and names the field; ``clamp`` brings what is to be sent inside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
import struct
import types
import typing
from collections.abc import Mapping, Sized
from dataclasses import MISSING, dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, NamedTuple

from flexd.core.bounds import Longest, Range
from flexd.core.errors import AuthenticationError, ControlError

MAX_MESSAGE_BYTES = 2**16
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


_MAX_INT = 2**64


class FieldError(ValueError):
    """A field is missing, of another type, or outside its bounds.

    Attributes:
        field: class and name, as declared.
    """

    def __init__(self, field: str, fault: str) -> None:
        self.field = field
        super().__init__(fault)


def to_json(value: Any) -> Any:
    """Return a dataclass as a dictionary, with the dataclasses in it; other values as they are."""
    if isinstance(value, tuple):
        return [to_json(part) for part in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {item.name: to_json(getattr(value, item.name)) for item in fields(value)}


class FieldType(NamedTuple):
    """The type of a field, taken apart.

    Attributes:
        base: a class, or ``tuple``.
        bounds: of the value; None for a part that has bounds of its own, and where any value will do.
        items: the type of each item of a tuple.
        size: number of items of a tuple, None for any.
        or_none: whether it may be None.
        optional: whether the field has a default.
    """

    base: Any
    bounds: Range | Longest | None = None
    items: FieldType | None = None
    size: int | None = None
    or_none: bool = False
    optional: bool = False


@cache
def wire_fields(cls: Any) -> Mapping[str, FieldType]:
    """Return the fields of a message or of a part of one. Those with a default are optional."""
    declared = typing.get_type_hints(cls, include_extras=True)
    return {
        item.name: _field_type(declared[item.name])._replace(optional=item.default is not MISSING)
        for item in fields(cls)
    }


def _field_type(hint: Any) -> FieldType:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        return _field_type(arguments[0])._replace(bounds=arguments[1])
    if isinstance(hint, types.UnionType):
        return _field_type(arguments[0])._replace(or_none=True)
    if typing.get_origin(hint) is tuple:
        size = None if arguments[-1] is Ellipsis else len(arguments)
        return FieldType(tuple, items=_field_type(arguments[0]), size=size)
    return FieldType(hint)


def build(cls: Any, data: dict[str, Any]) -> Any:
    """Make a dataclass of fields; unknown ones are ignored.

    Raises:
        FieldError: a field is missing, of another type, or outside its bounds.
    """
    known = wire_fields(cls)
    missing = [name for name, type_ in known.items() if not type_.optional and name not in data]
    if missing:
        raise FieldError(f"{cls.__name__}.{missing[0]}", f"{cls.__name__} without {', '.join(missing)}")
    return cls(**{
        name: _checked(type_, data[name], f"{cls.__name__}.{name}") for name, type_ in known.items() if name in data
    })  # fmt: skip


def _checked(type_: FieldType, value: Any, where: str) -> Any:
    base, bounds = type_.base, type_.bounds
    if value is None and type_.or_none:
        return None
    if dataclasses.is_dataclass(base) and isinstance(value, dict):
        return build(base, value)
    if type_.items is not None and isinstance(value, list):
        if (type_.size is not None and len(value) != type_.size) or _too_long(bounds, value):
            raise FieldError(where, f"{where} has {len(value)} items")
        return tuple(_checked(type_.items, item, where) for item in value)
    if base in (str, bool) and type(value) is base:
        if _too_long(bounds, value):
            raise FieldError(where, f"{where} has {len(value)} characters")
        return value
    whole = base is int and type(value) is int and abs(value) < _MAX_INT
    real = base is float and isinstance(value, int | float) and not isinstance(value, bool)
    if not whole and not real:
        raise FieldError(where, f"{where} is a {type(value).__name__}")
    if not math.isfinite(value) or (isinstance(bounds, Range) and not bounds.low <= value <= bounds.high):
        raise FieldError(where, f"{where} is {value}")
    return value if whole else float(value)


def _too_long(bounds: Range | Longest | None, value: Sized) -> bool:
    return isinstance(bounds, Longest) and len(value) > bounds.length


def clamp(value: Any) -> Any:
    """Return a dataclass with every field within its bounds.

    A number outside is set to the nearest bound, one that is not finite to the lowest; a text or a tuple that is too
    long is cut.
    """
    known = wire_fields(value.__class__)
    if all(_is_clamped(type_, getattr(value, name)) for name, type_ in known.items()):  # mostly, and much faster
        return value
    return dataclasses.replace(value, **{name: _clamped(type_, getattr(value, name)) for name, type_ in known.items()})


def _is_clamped(type_: FieldType, value: Any) -> bool:
    bounds = type_.bounds
    if isinstance(bounds, Range):
        return type(value) is type_.base and bounds.low <= value <= bounds.high
    if isinstance(bounds, Longest) and len(value) > bounds.length:
        return False
    if type_.items is not None:
        return not value or all(_is_clamped(type_.items, item) for item in value)
    return not hasattr(value, "__dataclass_fields__") or clamp(value) is value


def _clamped(type_: FieldType, value: Any) -> Any:
    bounds = type_.bounds
    if dataclasses.is_dataclass(value):
        return clamp(value)
    if isinstance(bounds, Range):
        return type_.base(min(max(value, bounds.low), bounds.high) if math.isfinite(value) else bounds.low)
    if isinstance(bounds, Longest):
        value = value[: bounds.length]
    return value if type_.items is None else tuple(_clamped(type_.items, item) for item in value)
