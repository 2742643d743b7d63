"""The messages between daemon and ranks: small signed JSON texts, parsed only after their signature is verified.

Wire form: 64 hex digits of HMAC-SHA256 over the rest, a newline, then canonical JSON (sorted keys, no spaces) with the
message's ``kind`` and fields. Freshness is mutual: a rank's hello carries a new nonce, the epoch announcement repeats
the nonces it is for and adds a new token, and every message of the epoch carries that token; so nothing recorded
earlier can be replayed, to either side.

Versions: a field with a default is optional: it may be missing in a message that is received. Unknown fields are
ignored, and so are messages of unknown kinds. ``docs/upgrading.md`` states what may change between two versions.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar

from flexd.control.protocol.report import StepReport
from flexd.core.errors import AuthenticationError, ControlError, UnknownMessageError
from flexd.core.secrets import Secret, accepted_keys, equals_any, signing_key

MAX_MESSAGE_BYTES = 64 * 1024
"""A longer message is refused unread: the largest honest one is an epoch announcement (17 bytes a rank)."""

_MAC_HEX = 64
_MAX_INT = 2**64
_MAX_INT_CHARACTERS = 21


@dataclass(frozen=True)
class Message:
    """Base of all messages. ``job`` is checked by every receiver."""

    kind: ClassVar[str] = ""
    job: str


@dataclass(frozen=True)
class DaemonNotice(Message):
    """The daemon that hosts this store.

    Attributes:
        instance: new for every start of the daemon.
        term: of its lease, 0 without one. A rank follows the highest term it has received.
    """

    kind: ClassVar[str] = "daemon"
    instance: str
    table_digest: str
    term: int


@dataclass(frozen=True)
class Hello(Message):
    """The registration of a rank; repeated with a higher ``sequence`` while the rank waits for an epoch.

    Attributes:
        session: new for every training process.
        nonce: new for every registration.
        address: local address of the rank's connection to the daemon.
        can_list: the rank can list its placement if the daemon has lost it.
        tables: the first tables of the rank (``table_entries``) if its digest is not the one of the daemon's notice,
            else empty.
        table_count: number of all its tables.
    """

    kind: ClassVar[str] = "hello"
    instance: str
    attempt: str
    rank: int
    world_size: int
    nodes: int
    local_ranks: int
    replica_slots: tuple[int, ...]
    table_digest: str
    session: str
    nonce: str
    sequence: int
    agreed_version: int
    agreed_digest: int
    address: str
    can_list: bool = False
    tables: tuple[str, ...] = ()
    table_count: int = 0


@dataclass(frozen=True)
class HelloRefused(Message):
    """The daemon refuses this rank's registration."""

    kind: ClassVar[str] = "hello_refused"
    instance: str
    nonce: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class EpochAnnouncement(Message):
    """The daemon opens an epoch for exactly the registrations ``nonces`` (by rank)."""

    kind: ClassVar[str] = "epoch"
    instance: str
    attempt: str
    generation: int
    epoch: int
    token: str
    term: int
    nonces: tuple[str, ...]


@dataclass(frozen=True)
class EpochMessage(Message):
    """Base of all messages inside an epoch; its fields are the fence."""

    attempt: str
    generation: int
    epoch: int
    token: str
    term: int


@dataclass(frozen=True)
class Settled(EpochMessage):
    """The rank has left the previous epoch and settled its inbox: it accepts no chunk before this epoch's first."""

    kind: ClassVar[str] = "settled"
    rank: int
    sequence: int
    agreed_version: int
    agreed_digest: int
    applied_version: int


@dataclass(frozen=True)
class Progress(EpochMessage):
    """The rank is alive, with its agreed and applied version, and a report of the steps since the last one, if any."""

    kind: ClassVar[str] = "progress"
    rank: int
    sequence: int
    agreed_version: int
    applied_version: int
    report: StepReport | None = None


@dataclass(frozen=True)
class ChunkRefused(EpochMessage):
    """The rank has refused a chunk whole."""

    kind: ClassVar[str] = "chunk_refused"
    rank: int
    sequence: int
    version: int
    reason: str


@dataclass(frozen=True)
class Listing(EpochMessage):
    """The response to ``ListRequest``: the rows follow over the group, unless ``error`` is set."""

    kind: ClassVar[str] = "listing"
    rank: int
    sequence: int
    version: int
    rows: int
    sha256: str
    error: str = ""


@dataclass(frozen=True)
class ChunkHeader(EpochMessage):
    """A chunk follows over the group: int64[rows] keys, uint8[2 rows] old tiers then new tiers."""

    kind: ClassVar[str] = "chunk"
    command: int
    plan_id: str
    version: int
    rows: int
    sha256: str


@dataclass(frozen=True)
class ListRequest(EpochMessage):
    """The daemon does not have the placement of ``version``: ``ranks`` list their rows above HOME."""

    kind: ClassVar[str] = "list"
    command: int
    version: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class TapOffer(EpochMessage):
    """The rank holds a payload of counted accesses (``flexd.core.tap_counts``), which it sends on request.

    Attributes:
        session: identifies the rank's process.
        number: of the payload; a process numbers its payloads from 0.
        urgent: the rank is about to end: a snapshot is to be written before the next regular one.
        format: of the payload; a daemon that does not read it requests nothing, and the rank keeps its counts.
    """

    kind: ClassVar[str] = "tap_offer"
    rank: int
    sequence: int
    session: str
    number: int
    bytes: int
    pieces: int
    urgent: bool = False
    format: int = 1


@dataclass(frozen=True)
class TapState(EpochMessage):
    """The daemon's progress with one rank's payloads.

    Attributes:
        acknowledged: a snapshot holds all payloads with a smaller number.
        grant: counts the requests of this epoch, from 1; the newest requests payload ``number``, from its first piece.
        problem: the reason why no payload is accepted, or empty.
    """

    kind: ClassVar[str] = "tap_state"
    rank: int
    session: str
    acknowledged: int
    grant: int
    number: int
    problem: str = ""


@dataclass(frozen=True)
class TapPiece(EpochMessage):
    """The header of one piece of a granted payload; ``sha256`` is of the bytes that follow it."""

    kind: ClassVar[str] = "tap_piece"
    rank: int
    number: int
    grant: int
    piece: int
    sha256: str


_KINDS: dict[str, type[Message]] = {
    cls.kind: cls
    for cls in (
        DaemonNotice, Hello, HelloRefused, EpochAnnouncement, Settled, Progress, ChunkRefused, Listing, ChunkHeader,
        ListRequest, TapOffer, TapState, TapPiece,
    )
}  # fmt: skip

AnyMessage = TypeVar("AnyMessage", bound=Message)


class Signer:
    """Seals and opens messages with the shared secret.

    Without a secret (loopback only) the signature is keyed with the empty string: it still detects damage. A secret
    file with two keys signs with the first and opens what either has signed.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def seal(self, message: Message) -> str:
        """Encode and sign a message. Raises ControlError if it is longer than ``MAX_MESSAGE_BYTES``."""
        body = json.dumps(
            {"kind": message.kind, **_to_json(message)}, sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        text = f"{_mac(signing_key(self._secret), body.encode()).decode()}\n{body}"
        if len(text) > MAX_MESSAGE_BYTES:
            raise ControlError(f"a {message.kind} message of {len(text)} bytes is longer than {MAX_MESSAGE_BYTES}")
        return text

    def open(self, data: bytes) -> Message:
        """Verify and parse a message.

        Raises:
            AuthenticationError: bad signature.
            UnknownMessageError: signed, of a kind that this version does not know.
            ControlError: signed, but a field that this version needs is missing or has another type.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise ControlError(f"a message of {len(data)} bytes is longer than {MAX_MESSAGE_BYTES}")
        mac, line_break, body = data[:_MAC_HEX], data[_MAC_HEX : _MAC_HEX + 1], data[_MAC_HEX + 1 :]
        if line_break != b"\n" or not equals_any(mac, [_mac(key, body) for key in accepted_keys(self._secret)]):
            raise AuthenticationError(
                "a control message is not signed with the shared secret",
                remedy="give daemon and trainers the same secret file",
            )
        return _from_body(body)

    def open_as(self, kind: type[AnyMessage], data: bytes) -> AnyMessage:
        """Open a message of the given kind. Raises as ``open``, and ControlError if it is of another kind."""
        message = self.open(data)
        if not isinstance(message, kind):
            raise ControlError(f"a {message.kind} message where a {kind.kind} message belongs")
        return message


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode()


def seal_with_bytes(signer: Signer, header: TapPiece, data: bytes) -> bytes:
    """Return the sealed header, a newline, and the bytes whose digest it names. Raises as ``Signer.seal``."""
    return signer.seal(header).encode() + b"\n" + data


def open_with_bytes(signer: Signer, sealed: bytes, max_data_bytes: int) -> tuple[TapPiece, bytes]:
    """Open what ``seal_with_bytes`` made; nothing is parsed before signature and digest are verified.

    Raises:
        AuthenticationError: bad signature, or other bytes than the header names.
        ControlError: too long, or another kind of message.
    """
    if len(sealed) > MAX_MESSAGE_BYTES + len(b"\n") + max_data_bytes:
        raise ControlError(f"a piece of {len(sealed)} bytes is longer than {max_data_bytes}")
    # The signature is on the first line, the header's JSON (which has no line breaks) on the second.
    end = sealed.find(b"\n", _MAC_HEX + 1, MAX_MESSAGE_BYTES + 1)
    if end < 0:
        raise ControlError("a piece without a header")
    header, data = signer.open_as(TapPiece, sealed[:end]), sealed[end + 1 :]
    if len(data) > max_data_bytes or not hmac.compare_digest(hashlib.sha256(data).hexdigest(), header.sha256):
        raise AuthenticationError(
            "the bytes of a piece are not those that were announced",
            remedy="look for a fault or an intruder on the control network",
        )
    return header, data


def _to_json(value: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in fields(value):
        field_value = getattr(value, item.name)
        out[item.name] = _to_json(field_value) if isinstance(field_value, StepReport) else field_value
    return out


def _no_constant(text: str) -> Any:
    raise ValueError(f"number {text}")


def _whole_number(text: str) -> int | float:
    # Python refuses to parse thousands of digits, which an unknown field may have. No known field has so many.
    return int(text) if len(text) <= _MAX_INT_CHARACTERS else float(text)


def _from_body(body: bytes) -> Message:
    try:
        data = json.loads(body, parse_constant=_no_constant, parse_int=_whole_number)
        if not isinstance(data, dict):
            raise ValueError("no JSON object")
        kind = data.pop("kind", None)
        if not isinstance(kind, str):
            raise ValueError("no kind")
        if kind not in _KINDS:
            raise UnknownMessageError(f"a signed control message of the unknown kind {kind[:40]!r}")
        return typing.cast(Message, _build(_KINDS[kind], data))
    except (ValueError, TypeError, RecursionError) as error:
        raise ControlError(
            f"a signed control message cannot be read: {error}",
            remedy="run versions of flexd that work together (docs/upgrading.md)",
        ) from error


class _Field(NamedTuple):
    hint: Any
    optional: bool


@cache
def wire_fields(cls: Any) -> Mapping[str, _Field]:
    """Return the fields of a message or of a part of one. Those with a default are optional."""
    hints = typing.get_type_hints(cls)
    return {
        item.name: _Field(hints[item.name], item.default is not MISSING or item.default_factory is not MISSING)
        for item in fields(cls)
    }


def _build(cls: Any, data: dict[str, Any]) -> Any:
    known = wire_fields(cls)
    missing = [name for name, field in known.items() if not field.optional and name not in data]
    if missing:
        raise ValueError(f"{cls.__name__} without {', '.join(missing)}")
    return cls(**{
        name: _checked(field.hint, data[name], f"{cls.__name__}.{name}")
        for name, field in known.items()
        if name in data
    })  # fmt: skip


def _checked(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        return None if value is None else _checked(typing.get_args(hint)[0], value, where)
    if hint is StepReport and isinstance(value, dict):
        return _build(StepReport, value)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        inner = typing.get_args(hint)
        if inner[-1] is not Ellipsis and len(inner) != len(value):
            raise ValueError(f"{where} has {len(value)} items")
        return tuple(_checked(inner[0], item, where) for item in value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint is int and type(value) is int and abs(value) < _MAX_INT:
        return value
    if hint in (str, bool) and type(value) is hint:
        return value
    raise ValueError(f"{where} is a {type(value).__name__}")
