"""The messages between daemon and ranks: small JSON texts, the heads of the frames of an authenticated connection.

Wire form: canonical JSON (sorted keys, no spaces) with the message's ``kind`` and fields. The connection proves who
sent a message and that it was not changed, repeated, moved or put in another order. What a message is about is fenced
here: a rank's hello carries a new nonce, the epoch announcement repeats it and adds a new token, and every message of
the epoch carries that token; so nothing that an earlier epoch, registration or daemon left on its way acts, on either
side.

The body of a list of rows is int64[n] keys (little endian), then uint8[k n] tiers. It travels in pieces of
``PIECE_BYTES``: the first as the body of the message that announces the list, each further one with a message of its
own.

Versions: a field with a default is optional: it may be missing in a message that is received. Unknown fields are
ignored, and so are messages of unknown kinds. ``docs/upgrading.md`` states what may change between two versions.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from flexd.control.protocol.report import PlacementState, StepReport, TrainerSettings
from flexd.control.protocol.wire import FieldError, build, to_json
from flexd.core.arrays import Int64Array, UInt8Array
from flexd.core.errors import ControlError, UnknownMessageError

Bytes = bytes | memoryview

PIECE_BYTES = 2**20
"""Bytes of every piece of a list but the last."""
MAX_ROWS = 2**26
"""Rows in one chunk or listing: bounds the memory that a message makes its receiver allocate."""


_KINDS: dict[str, type[ControlMessage]] = {}


class ControlMessage:
    """Base of all messages. Those that travel have a ``kind``."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind
        if kind:
            _KINDS[kind] = cls


@dataclass(frozen=True)
class DaemonNotice(ControlMessage, kind="daemon"):
    """The first message on every connection: the daemon at its other end.

    Attributes:
        job: that the daemon serves.
        instance: new for every start of the daemon.
        table_digest: of its tables; empty if it has none yet. A rank whose digest differs sends its tables.
    """

    job: str
    instance: str
    table_digest: str


@dataclass(frozen=True)
class RankIdentity:
    """The identity of one training process, fixed for its life.

    Attributes:
        job: name, equal on daemon and ranks.
        attempt: the job attempt (unique per launch, equal on all its ranks).
        rank, nodes, local_ranks: see ``RankLayout``.
        replica_slots: replica slots of this rank for each dim-group of the key space.
        table_digest: ``KeySpace.digest`` of the trainer's tables.
        trainer: how its collections were constructed; None: the daemon goes by its configuration.
        copies_memory_bytes: memory of this rank for the copies of all dim-groups together; None: as much as the slots
            take.
    """

    job: str
    attempt: str
    rank: int
    nodes: int
    local_ranks: int
    replica_slots: tuple[int, ...]
    table_digest: str
    trainer: TrainerSettings | None = None
    copies_memory_bytes: int | None = None

    @property
    def world_size(self) -> int:
        return self.nodes * self.local_ranks


@dataclass(frozen=True)
class Hello(ControlMessage, kind="hello"):
    """The registration of a rank; repeated while the rank waits for an epoch.

    Attributes:
        session: new for every training process.
        nonce: new for every registration, which has one connection.
        agreed: the placement that it has agreed on.
        address: local address of the rank's connection to the daemon.
    """

    identity: RankIdentity
    instance: str
    session: str
    nonce: str
    agreed: PlacementState
    address: str = ""


@dataclass(frozen=True)
class TableList(ControlMessage, kind="tables"):
    """All tables of the job, in the body (``report.tables_body``), before the hello of the rank that sends them.

    Attributes:
        digest: ``KeySpace.digest`` of the tables.
    """

    instance: str
    digest: str


@dataclass(frozen=True)
class HelloRefused(ControlMessage, kind="hello_refused"):
    """The daemon refuses this rank's registration."""

    nonce: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Heartbeat(ControlMessage, kind="heartbeat"):
    """The daemon is alive and reads: sent to every rank at intervals."""


@dataclass(frozen=True)
class Fence:
    """The epoch that a message belongs to. ``token`` is new for every epoch."""

    job: str
    attempt: str
    generation: int
    epoch: int
    token: str


@dataclass(frozen=True)
class EpochMessage(ControlMessage):
    """Base of all messages of an epoch. The connection names the rank."""

    fence: Fence


@dataclass(frozen=True)
class EpochAnnouncement(EpochMessage, kind="epoch"):
    """The daemon opens an epoch for the registration ``nonce`` and for others that this rank need not know.

    Attributes:
        report_seconds: shortest time between two reports of a rank; grows with the number of ranks.
    """

    nonce: str
    report_seconds: float = 0.2


@dataclass(frozen=True)
class EpochGo(EpochMessage, kind="go"):
    """All ranks have settled on the same placement: chunks may follow.

    Attributes:
        exchange: of chain and direct the one that the daemon prices lower; empty if it has not priced them.
    """

    exchange: str = ""


@dataclass(frozen=True)
class EpochEnd(EpochMessage, kind="end"):
    """The daemon ends the epoch; the rank stays registered for the next one."""


@dataclass(frozen=True)
class Settled(EpochMessage, kind="settled"):
    """The rank has left the previous epoch and settled its inbox: it accepts no chunk before this epoch's first."""

    agreed: PlacementState
    applied_version: int


@dataclass(frozen=True)
class Progress(EpochMessage, kind="progress"):
    """The rank is alive, with its agreed and applied version, and a report of the steps since the last one, if any."""

    agreed_version: int
    applied_version: int
    report: StepReport | None = None


@dataclass(frozen=True)
class ChunkRefused(EpochMessage, kind="chunk_refused"):
    """The rank has refused a chunk whole."""

    version: int
    reason: str


@dataclass(frozen=True)
class Listing(EpochMessage, kind="listing"):
    """The response to ``ListRequest``, with the first piece of the rows (int64[rows]
    keys, uint8[rows] tiers), unless ``error`` is set.
    """

    version: int
    rows: int
    error: str = ""


@dataclass(frozen=True)
class ChunkHeader(EpochMessage, kind="chunk"):
    """A chunk, with the first piece of its rows: int64[rows] keys, uint8[2 rows] old tiers then new tiers."""

    plan_id: str
    version: int
    rows: int


@dataclass(frozen=True)
class RowsPiece(EpochMessage, kind="rows"):
    """The next piece of the rows of the newest ``ChunkHeader`` or ``Listing`` on this connection."""


@dataclass(frozen=True)
class ListRequest(EpochMessage, kind="list"):
    """The daemon does not have the placement of ``version``: this rank lists its rows above HOME."""

    version: int


@dataclass(frozen=True)
class TapOffer(EpochMessage, kind="tap_offer"):
    """The rank holds a payload of counted accesses (``flexd.core.tap_counts``), which it sends on request.

    Attributes:
        number: of the payload; a process numbers its payloads from 0.
        urgent: the rank is about to end: a snapshot is to be written before the next regular one.
        format: of the payload; a daemon that does not read it requests nothing, and the rank keeps its counts.
    """

    number: int
    bytes: int
    urgent: bool = False
    format: int = 1


@dataclass(frozen=True)
class TapState(EpochMessage, kind="tap_state"):
    """The daemon's progress with one rank's payloads.

    Attributes:
        acknowledged: a snapshot holds all payloads with a smaller number.
        grant: counts the requests of this epoch, from 1; the newest requests payload ``number``, from its first piece.
        problem: the reason why no payload is accepted, or empty.
    """

    acknowledged: int
    grant: int
    number: int
    problem: str = ""


@dataclass(frozen=True)
class TapPiece(EpochMessage, kind="tap_piece"):
    """The next piece of the payload that ``grant`` requested."""

    grant: int


class MalformedReportError(ControlError):
    """A message is in order but for its report.

    Attributes:
        rest: the message without the report.
        field: of the report: the first one that is missing, of another type, or outside its bounds.
    """

    def __init__(self, rest: Progress, error: FieldError) -> None:
        super().__init__(f"the report of a rank cannot be read: {error}")
        self.rest = rest
        self.field = error.field


def encode(message: ControlMessage) -> bytes:
    """Return the wire form of a message. Raises ControlError: a value that JSON does not have."""
    try:
        return json.dumps(
            {"kind": message.kind, **to_json(message)}, sort_keys=True, separators=(",", ":"), allow_nan=False
        ).encode()
    except (TypeError, ValueError) as error:
        raise ControlError(f"a {message.kind} message cannot be sent: {error}") from error


def decode(data: bytes) -> ControlMessage:
    """Parse a message that arrived on an authenticated connection.

    Raises:
        UnknownMessageError: of a kind that this version does not know.
        MalformedReportError: its report is not in order, the rest of it is.
        ControlError: a field that this version needs is missing or has another type.
    """
    try:
        body = json.loads(data)
        if not isinstance(body, dict) or not isinstance(kind := body.pop("kind", None), str):
            raise ValueError("no JSON object with a kind")
        if kind not in _KINDS:
            raise UnknownMessageError(f"a control message of the unknown kind {kind[:40]!r}")
        report = body.pop("report", None) if kind == Progress.kind else None
        message = typing.cast(ControlMessage, build(_KINDS[kind], body))
        return message if report is None else _with_report(message, report)
    except (ValueError, TypeError, RecursionError) as error:
        raise ControlError(
            f"a control message cannot be read: {error}",
            remedy="run versions of flexd that work together (docs/upgrading.md)",
        ) from error


def _with_report(message: ControlMessage, report: Any) -> Progress:
    progress = typing.cast(Progress, message)
    try:
        if not isinstance(report, dict):
            raise FieldError("Progress.report", f"it is a {type(report).__name__}")
        return replace(progress, report=build(StepReport, report))
    except FieldError as error:
        raise MalformedReportError(progress, error) from error


def rows_body(keys: Int64Array, *tiers: UInt8Array) -> bytes:
    """Return int64[n] keys and one or two uint8[n] tiers of each as they travel, and as the journal has them."""
    return b"".join([keys.astype("<i8").tobytes(), *(part.astype(np.uint8).tobytes() for part in tiers)])


def pieces_of(body: bytes) -> Sequence[Bytes]:
    """Cut a body into its pieces, at least one."""
    if len(body) <= PIECE_BYTES:
        return [body]
    view = memoryview(body)
    return [view[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)]


class RowsAssembly:
    """Collects the pieces of one announced list; allocates only what has arrived.

    Args:
        rows: number of rows.
        tiers_per_row: 2 for a chunk (old and new tier), 1 for a listing.

    Raises:
        ControlError: the announced number of rows is not possible.
    """

    def __init__(self, rows: int, tiers_per_row: int) -> None:
        if not 0 <= rows <= MAX_ROWS:
            raise ControlError(f"{rows} rows in one message", remedy=f"at most {MAX_ROWS}")
        self._rows = rows
        self._missing = rows * (8 + tiers_per_row)
        self._pieces: list[Bytes] = []

    def add(self, data: Bytes) -> bool:
        """Add the next piece; True if it was the last. Raises ControlError: it is not as long as it must be."""
        if len(data) != min(PIECE_BYTES, self._missing) or (self._pieces and not self._missing):
            raise ControlError(
                f"piece {len(self._pieces)} of a list of {self._rows} rows has {len(data)} bytes",
                remedy="run versions of flexd that work together",
            )
        self._pieces.append(data)
        self._missing -= len(data)
        return not self._missing

    def rows(self) -> tuple[Int64Array, UInt8Array]:
        """Return int64[rows] keys and uint8[tiers_per_row * rows] tiers of a complete list."""
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        keys = np.frombuffer(body, "<i8", self._rows).astype(np.int64)
        return keys, np.frombuffer(body, np.uint8, offset=8 * self._rows).copy()
