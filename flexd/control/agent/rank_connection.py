"""One rank's connection to one instance of the daemon, from its notice to the first error.

::

    connecting --(daemon's notice; hello)--> waiting --(epoch with its nonce)-> settling --(go)--> joined
        ^                                      ^  ^                                 |                |
        |                                      |  `------(epoch ended by the daemon)-+----------------'
        `----(any error; back-off, new nonce)--+----------------------------------------------------'

The thread blocks in ``ChannelClient.receive`` until a message arrives, something else is to be done (the training
thread or the tap wakes it), or the earliest of its deadlines passes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np

from flexd.control.agent.agent_context import AgentContext
from flexd.control.agent.channel_client import ChannelClient
from flexd.control.agent.inbox import cannot_prepare
from flexd.control.agent.tap_outbox import TapSender
from flexd.control.protocol.frames import Frame
from flexd.control.protocol.messages import (
    ChunkHeader,
    ChunkPiece,
    ChunkRefused,
    DaemonNotice,
    EpochAnnouncement,
    EpochEnd,
    EpochGo,
    EpochMessage,
    Heartbeat,
    Hello,
    HelloRefused,
    Listing,
    ListingPiece,
    ListRequest,
    Message,
    Progress,
    Settled,
    TableList,
    TapState,
    decode,
    encode,
)
from flexd.control.protocol.network import CHANNEL_ERRORS, named_error, new_token
from flexd.control.protocol.rows import MAX_ROWS, Bytes, RowsAssembly, pieces_of, rows_body
from flexd.control.protocol.table_lists import tables_body
from flexd.core.errors import (
    AuthenticationError,
    ChunkRefusedError,
    ControlError,
    StaleMessageError,
    TopologyError,
    UnknownMessageError,
)
from flexd.core.placement import Delta
from flexd.core.supervision import Backoff

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
"""Longest time between two messages of a healthy rank; longer where the daemon asks for fewer reports."""
_HEARD_SHARE = 0.5
"""Of the timeout: the silence after which no report is sent to the daemon."""


class RankConnection:
    """Registers, waits for an epoch and serves it. Used once, by the agent's thread."""

    def __init__(self, context: AgentContext, backoff: Backoff) -> None:
        self._context = context
        self._backoff = backoff
        self._inbox = context.inbox
        self._me = context.identity
        self._nonce = new_token()
        self._notice: DaemonNotice | None = None
        self._epoch: EpochAnnouncement | None = None
        self._last_epoch = 0
        self._refused_epoch = 0
        self._joined = False
        self._chunk: ChunkHeader | None = None
        self._assembly: RowsAssembly | None = None
        self._listing: ListRequest | None = None
        """Answered once every agreed chunk is applied; no chunk is pushed meanwhile."""
        self._listing_until = 0.0
        self._tap: TapSender | None = None
        self._version, self._digest = 0, 0
        self._heard_at = 0.0
        self._sent_at = 0.0
        self._reported_at = 0.0
        self._sent_versions = (-1, -1)

    def run(self) -> None:
        """Raises channel errors, TopologyError if the daemon refuses this rank; returns when stopping."""
        context = self._context
        context.state = "connecting"
        self._client = context.client = ChannelClient.connect(
            *context.address, context.credentials, context.timeout_seconds
        )
        try:
            self._heard_at = self._sent_at = time.monotonic()
            while not context.stopping.is_set():
                more = self._advance()
                frame = self._client.receive(0.0 if more else self._wait_seconds())
                if frame is not None:
                    self._heard_at = time.monotonic()
                    self._receive(frame)
                elif time.monotonic() - self._heard_at > context.timeout_seconds:
                    raise ControlError(f"the daemon does not answer in {context.timeout_seconds:g} s")
            if self._joined:
                self._send_progress(final=True)
        finally:
            context.client = None
            self._client.close()

    def _advance(self) -> bool:
        """Do what is due; True if there is more to do at once."""
        if self._notice is None:
            return False
        if self._epoch is None:
            if time.monotonic() - self._sent_at >= HEARTBEAT_SECONDS:
                self._hello()
            return False
        self._send_progress()
        if not self._joined:
            return False
        if self._listing is not None:
            self._answer(self._listing)
        more = self._prepare_next()
        if self._tap is not None:
            more |= self._tap.advance()
        return more

    def _wait_seconds(self) -> float:
        """Return the time until something is due, if nothing happens before."""
        context = self._context
        until = self._heard_at + context.timeout_seconds
        if self._notice is not None:
            until = min(until, self._sent_at + self._heartbeat_seconds)
        if self._epoch is not None and context.reports.waiting and self._hears_the_daemon():
            until = min(until, self._reported_at + self._epoch.report_seconds)
        if self._listing is not None:
            until = min(until, self._listing_until)
        return max(until - time.monotonic(), 0.0)

    def _hears_the_daemon(self) -> bool:
        """A report waits, merged with those that follow, while the daemon is silent: it may be lost there."""
        return time.monotonic() - self._heard_at < _HEARD_SHARE * self._context.timeout_seconds

    @property
    def _heartbeat_seconds(self) -> float:
        return HEARTBEAT_SECONDS if self._epoch is None else max(HEARTBEAT_SECONDS, self._epoch.report_seconds)

    def _receive(self, frame: Frame) -> None:
        try:
            message = decode(frame.message)
        except UnknownMessageError:
            self._context.count("unknown_messages")
            return
        if message.job != self._me.job:
            raise StaleMessageError(f"the daemon serves job {message.job!r}, not {self._me.job!r}")
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, DaemonNotice):
            self._register(message)
        elif isinstance(message, HelloRefused):
            if (message.instance, message.nonce) == (self._instance, self._nonce):
                raise TopologyError(f"the daemon refuses this rank: {message.reason}", remedy=message.remedy)
        elif isinstance(message, EpochAnnouncement):
            self._begin_epoch(message)
        elif isinstance(message, EpochMessage):
            self._receive_in_epoch(message, frame.body)
        else:
            raise ControlError(f"a {message.kind} message from the daemon")

    def _receive_in_epoch(self, message: EpochMessage, body: Bytes) -> None:
        if self._epoch is None or self._fence_of(message) != self._fence():
            raise StaleMessageError(f"a {message.kind} message of another attempt, generation or epoch")
        if isinstance(message, EpochEnd):
            self._end_epoch()
        elif isinstance(message, EpochGo):
            self._inbox.priced_exchange = message.exchange
            self._join()
        elif not self._joined:
            raise StaleMessageError(f"a {message.kind} message before the ranks have joined the epoch")
        elif isinstance(message, ChunkHeader):
            self._begin_chunk(message, body)
        elif isinstance(message, ChunkPiece):
            self._continue_chunk(message, body)
        elif isinstance(message, ListRequest):
            self._listing, self._listing_until = message, time.monotonic() + self._context.timeout_seconds
        elif isinstance(message, TapState) and self._tap is not None:
            self._tap.record_state(message)
        else:
            raise ControlError(f"a {message.kind} message from the daemon")

    @property
    def _instance(self) -> str:
        return "" if self._notice is None else self._notice.instance

    def _register(self, notice: DaemonNotice) -> None:
        context = self._context
        if self._notice is not None:
            raise StaleMessageError("a second notice of the daemon")
        self._notice = notice
        context.count("connects")
        if context.lost_at is not None:
            level = logging.WARNING if context.warned_of_loss else logging.INFO
            away = time.monotonic() - context.lost_at
            logger.log(level, "rank %d: the daemon is back after %.0f s", self._me.rank, away)
            context.lost_at, context.warned_of_loss = None, False
        context.state = "waiting for the other ranks"
        self._settle()
        if notice.table_digest != self._me.table_digest:
            self._send(TableList(self._me.job, self._instance, self._me.table_digest), tables_body(self._me.tables))
        self._hello()

    def _settle(self) -> None:
        """Drop the chunks that are not agreed; waits for the exchange of the running step."""
        self._version, self._digest = self._inbox.settle(self._context.timeout_seconds)
        # The daemon's messages wait meanwhile: that is no silence of the daemon.
        self._heard_at = time.monotonic()

    def _hello(self) -> None:
        me = self._me
        self._send(
            Hello(
                job=me.job, instance=self._instance, attempt=me.attempt, rank=me.rank, world_size=me.world_size,
                nodes=me.nodes, local_ranks=me.local_ranks, replica_slots=me.replica_slots,
                table_digest=me.table_digest, session=self._context.session, nonce=self._nonce,
                sequence=self._next_sequence(), agreed_version=self._version, agreed_digest=self._digest,
                address=self._client.local_address, trainer=me.trainer,
            )
        )  # fmt: skip

    def _is_for_me(self, announcement: EpochAnnouncement) -> bool:
        notice = self._notice
        return (
            notice is not None
            and announcement.job == self._me.job
            and announcement.instance == notice.instance
            and announcement.attempt == self._me.attempt
            and announcement.epoch > self._last_epoch
            and announcement.nonce == self._nonce
        )

    def _begin_epoch(self, epoch: EpochAnnouncement) -> None:
        if self._epoch is not None or not self._is_for_me(epoch):
            raise StaleMessageError("an epoch of another daemon or registration")
        self._epoch = epoch
        self._last_epoch = epoch.epoch
        self._context.state = f"settling for epoch {epoch.epoch}"
        self._settle()
        self._send(
            Settled(
                **self._fence(), rank=self._me.rank, sequence=self._next_sequence(), agreed_version=self._version,
                agreed_digest=self._digest, applied_version=self._inbox.applied_version,
            )
        )  # fmt: skip

    def _join(self) -> None:
        assert self._epoch is not None  # noqa: S101
        context = self._context
        context.count("epochs")
        context.state = f"joined epoch {self._epoch.epoch}"
        context.last_logged = ""
        self._joined = True
        if context.outbox is not None:
            self._tap = TapSender(
                context.outbox, self._fence(), self._me.rank, context.session, self._send, self._next_sequence
            )

    def _end_epoch(self) -> None:
        self._epoch, self._joined, self._tap = None, False, None
        self._chunk = self._assembly = self._listing = None
        self._context.state = "waiting for the other ranks"

    def _answer(self, request: ListRequest) -> None:
        """List the rows if the requested version is applied, or say that it is not once it takes too long."""
        context, applied = self._context, self._inbox.applied_version
        if applied != request.version and time.monotonic() < self._listing_until:
            return
        self._listing = None
        keys, tiers = np.empty(0, np.int64), np.empty(0, np.uint8)
        error = f"version {applied} is applied, not {request.version}: training does not step"
        if applied == request.version:
            error = ""
            try:
                keys, tiers = context.lists()
            except Exception as failure:
                logger.warning("rank %d: its placement cannot be listed", self._me.rank, exc_info=failure)
                error = named_error(failure)
        body = rows_body(np.ascontiguousarray(keys, np.int64), np.ascontiguousarray(tiers, np.uint8))
        first, *others = pieces_of(body)
        sender = {**self._fence(), "rank": self._me.rank}
        self._send(
            Listing(
                **sender, sequence=self._next_sequence(), version=request.version, rows=len(keys),
                sha256=hashlib.sha256(body).hexdigest(), error=error,
            ),
            first,
        )  # fmt: skip
        for number, piece in enumerate(others, start=1):
            self._send(ListingPiece(**sender, sequence=self._next_sequence(), piece=number), piece)

    def _begin_chunk(self, header: ChunkHeader, body: Bytes) -> None:
        if self._assembly is not None:
            raise ControlError(f"chunk {header.version} before chunk {self._chunk_version} is complete")
        self._chunk, self._assembly = header, RowsAssembly(header.rows, 2, header.sha256, MAX_ROWS)
        self._add_to_chunk(body)

    def _continue_chunk(self, piece: ChunkPiece, body: Bytes) -> None:
        if self._assembly is None or (piece.version, piece.piece) != (self._chunk_version, self._assembly.next_piece):
            raise ControlError(f"piece {piece.piece} of chunk {piece.version} does not follow what was received")
        self._add_to_chunk(body)

    @property
    def _chunk_version(self) -> int:
        return 0 if self._chunk is None else self._chunk.version

    def _add_to_chunk(self, body: Bytes) -> None:
        header, assembly = self._chunk, self._assembly
        assert header is not None and assembly is not None  # noqa: S101, PT018
        if not assembly.add(body):
            return
        self._chunk = self._assembly = None
        try:
            self._offer(header, assembly)
        except ChunkRefusedError as error:
            self._refuse(error, header.version)
        except CHANNEL_ERRORS:
            raise
        except Exception as error:
            self._refuse(cannot_prepare(self._me.rank, header.version, error), header.version)

    def _offer(self, header: ChunkHeader, assembly: RowsAssembly) -> None:
        try:
            keys, tiers = assembly.rows()
        except AuthenticationError as error:
            self._context.count("tampered")
            raise AuthenticationError(f"chunk {header.version}: {error.message}", remedy=error.remedy) from error
        if self._refused_epoch == header.epoch:
            return  # The daemon ends this epoch; chunks after a refused one cannot follow.
        self._inbox.offer(header.version, Delta(keys, tiers[: header.rows], tiers[header.rows :]))
        self._context.count("chunks")

    def _prepare_next(self) -> bool:
        try:
            return self._inbox.prepare_next()
        except ChunkRefusedError as error:
            self._refuse(error)
            return False

    def _refuse(self, error: ChunkRefusedError, version: int = 0) -> None:
        """Refuse a chunk by name; the daemon ends the epoch and the migration."""
        self._refused_epoch = self._last_epoch
        self._context.count("chunks_refused")
        logger.warning("rank %d: %s", self._me.rank, error)
        self._send(
            ChunkRefused(
                **self._fence(), rank=self._me.rank, sequence=self._next_sequence(), version=error.version or version,
                reason=str(error)[:1000],
            )
        )  # fmt: skip

    def _send_progress(self, final: bool = False) -> None:
        assert self._epoch is not None  # noqa: S101
        now = time.monotonic()
        versions = (self._inbox.agreed_version, self._inbox.applied_version)
        due = now - self._reported_at >= self._epoch.report_seconds
        pending = self._context.reports.waiting and (final or (due and self._hears_the_daemon()))
        if not (pending or versions != self._sent_versions or now - self._sent_at >= self._heartbeat_seconds):
            return
        report = self._context.reports.drain() if pending else None
        progress = Progress(
            **self._fence(), rank=self._me.rank, sequence=self._next_sequence(), agreed_version=versions[0],
            applied_version=versions[1], report=report,
        )  # fmt: skip
        try:
            data = encode(progress)
        except ControlError as error:
            if report is None:
                raise
            self._drop_report(error)
            data, report = encode(replace(progress, report=None)), None
        try:
            self._send_encoded(data)
        except BaseException:
            if report is not None:
                self._context.reports.restore(report)
            raise
        if versions[1] > self._sent_versions[1] >= 0:
            # Not when the epoch is joined: an epoch that ends at its first chunk would be joined again at full speed.
            self._backoff.reset()
        self._sent_versions = versions
        if report is not None:
            self._reported_at = self._sent_at
        self._context.count("reports", 1 if report is not None else 0)

    def _drop_report(self, error: ControlError) -> None:
        """Drop a report that cannot be encoded: kept, it would be merged into the next, and end every connection."""
        context = self._context
        context.count("reports_dropped")
        if context.counters["reports_dropped"] == 1:
            logger.warning(
                "rank %d: a report of training steps is dropped, the daemon lacks these steps: %s (logged once)",
                self._me.rank, error,
            )  # fmt: skip

    def _send(self, message: Message, body: Bytes = b"") -> None:
        self._send_encoded(encode(message), body)

    def _send_encoded(self, message: bytes, body: Bytes = b"") -> None:
        self._client.send(message, body)
        self._sent_at = time.monotonic()

    def _next_sequence(self) -> int:
        self._context.sequence += 1
        return self._context.sequence

    def _fence(self) -> dict[str, Any]:
        assert self._epoch is not None  # noqa: S101
        return self._fence_of(self._epoch)

    @staticmethod
    def _fence_of(message: EpochMessage | EpochAnnouncement) -> dict[str, Any]:
        return {name: getattr(message, name) for name in ("job", "attempt", "generation", "epoch", "token")}
