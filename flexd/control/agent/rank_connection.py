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

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.agent.inbox import ChunkInbox, cannot_prepare
from flexd.control.agent.tap_outbox import TapOutbox, TapSender
from flexd.control.protocol.handshake import CHANNEL_ERRORS, ChannelCredentials, named_error, new_token
from flexd.control.protocol.messages import (
    Bytes,
    ChunkHeader,
    ChunkRefused,
    ControlMessage,
    DaemonNotice,
    EpochAnnouncement,
    EpochEnd,
    EpochGo,
    EpochMessage,
    Fence,
    Heartbeat,
    Hello,
    HelloRefused,
    Listing,
    ListRequest,
    Progress,
    RankIdentity,
    RowsAssembly,
    RowsPiece,
    Settled,
    TableList,
    TapState,
    decode,
    encode,
    pieces_of,
    rows_body,
)
from flexd.control.protocol.report import PlacementState, StepReport, merge_reports, tables_body
from flexd.control.protocol.wire import Frame, clamp
from flexd.core.errors import (
    ChunkRefusedError,
    ControlError,
    StaleMessageError,
    TopologyError,
    UnknownMessageError,
)
from flexd.core.keyspace import TableSpec
from flexd.core.placement import Delta
from flexd.core.supervision import Backoff

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
"""Longest time between two messages of a healthy rank; longer where the daemon asks for fewer reports."""
_HEARD_SHARE = 0.5
"""Of the timeout: the silence after which no report is sent to the daemon."""


PlacementLists = Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]


class PendingReports:
    """Steps not reported yet, merged into one report. ``add``, from the training thread, waits for a swap at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: StepReport | None = None

    @property
    def waiting(self) -> bool:
        return self._pending is not None

    def add(self, report: StepReport) -> bool:
        """Add a report; True if none was waiting. What it has outside its bounds is clamped: a sum would keep it."""
        report = clamp(report)
        with self._lock:
            first = self._pending is None
            self._pending = merge_reports(self._pending, report)
            return first

    def drain(self) -> StepReport | None:
        with self._lock:
            pending, self._pending = self._pending, None
        return None if pending is None else clamp(pending)

    def restore(self, report: StepReport) -> None:
        """Restore a report that could not be sent; it is older than any added meanwhile."""
        with self._lock:
            self._pending = report if self._pending is None else merge_reports(report, self._pending)


@dataclass(frozen=True)
class AgentOptions:
    """Identity, address and credentials of a rank, fixed for the life of its agent.

    Attributes:
        identity, lists, timeout_seconds: see ``Agent``.
        address: host and port of the daemon's control channel; the host is resolved at every connection.
        tables: sent to a daemon whose digest differs.
    """

    identity: RankIdentity
    address: tuple[str, int]
    credentials: ChannelCredentials
    lists: PlacementLists
    timeout_seconds: float
    tables: tuple[TableSpec, ...]


@dataclass
class AgentContext:
    """State that a rank keeps from one connection to the next. Shared by the agent's callers and its thread.

    Attributes:
        session: identifies this process; no two launches of a rank have the same.
        state: the present activity or problem, in words.
        last_logged: the newest failure, which is not logged twice.
        client: the connection in use, if any.
        lost_at: when the daemon was lost that this rank was connected to; None while there is one.
        warned_of_loss: a warning of it was logged.
    """

    options: AgentOptions
    inbox: ChunkInbox
    outbox: TapOutbox | None
    reports: PendingReports = field(default_factory=PendingReports)
    stopping: threading.Event = field(default_factory=threading.Event)
    counters: Counter[str] = field(default_factory=Counter)
    session: str = field(default_factory=new_token)
    state: str = "not started"
    last_logged: str = ""
    client: ChannelClient | None = None
    lost_at: float | None = None
    warned_of_loss: bool = False

    def wake(self) -> None:
        """Make the agent's thread look for something to do. From any thread; never waits."""
        client = self.client
        if client is not None:
            client.wake()


class RankConnection:
    """Registers, waits for an epoch and serves it. Used once, by the agent's thread."""

    def __init__(self, context: AgentContext, backoff: Backoff) -> None:
        self._context = context
        self._backoff = backoff
        self._inbox = context.inbox
        self._options = context.options
        self._timeout = context.options.timeout_seconds
        self._me = context.options.identity
        self._nonce = new_token()
        self._instance = ""
        """Of the daemon; empty before its notice."""
        self._epoch: EpochAnnouncement | None = None
        self._last_epoch = 0
        self._refused_epoch = 0
        self._joined = False
        self._chunk: tuple[ChunkHeader, RowsAssembly] | None = None
        self._listing: ListRequest | None = None
        """Answered once every agreed chunk is applied; no chunk is pushed meanwhile."""
        self._listing_until = 0.0
        self._tap: TapSender | None = None
        self._agreed = PlacementState(0, 0)
        self._heard_at = 0.0
        self._sent_at = 0.0
        self._reported_at = 0.0
        self._sent_versions = (-1, -1)

    def run(self) -> None:
        """Raises channel errors, TopologyError if the daemon refuses this rank; returns when stopping."""
        context = self._context
        context.state = "connecting"
        options = self._options
        self._client = context.client = ChannelClient.connect(*options.address, options.credentials, self._timeout)
        try:
            self._heard_at = self._sent_at = time.monotonic()
            while not context.stopping.is_set():
                more = self._advance()
                frame = self._client.receive(0.0 if more else self._wait_seconds())
                if frame is not None:
                    self._heard_at = time.monotonic()
                    self._receive(frame)
                elif time.monotonic() - self._heard_at > self._timeout:
                    raise ControlError(f"the daemon does not answer in {self._timeout:g} s")
            if self._joined:
                self._send_progress(final=True)
        finally:
            context.client = None
            self._client.close()

    def _advance(self) -> bool:
        """Do what is due; True if there is more to do at once."""
        if not self._instance:
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
        until = self._heard_at + self._timeout
        if self._instance:
            until = min(until, self._sent_at + self._heartbeat_seconds)
        if self._epoch is not None and self._context.reports.waiting and self._hears_the_daemon():
            until = min(until, self._reported_at + self._epoch.report_seconds)
        if self._listing is not None:
            until = min(until, self._listing_until)
        return max(until - time.monotonic(), 0.0)

    def _hears_the_daemon(self) -> bool:
        """A report waits, merged with those that follow, while the daemon is silent: it may be lost there."""
        return time.monotonic() - self._heard_at < _HEARD_SHARE * self._timeout

    @property
    def _heartbeat_seconds(self) -> float:
        return HEARTBEAT_SECONDS if self._epoch is None else max(HEARTBEAT_SECONDS, self._epoch.report_seconds)

    def _receive(self, frame: Frame) -> None:
        try:
            message = decode(frame.message)
        except UnknownMessageError:
            self._context.counters["unknown_messages"] += 1
            return
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, DaemonNotice):
            self._register(message)
        elif isinstance(message, HelloRefused):
            if message.nonce == self._nonce:
                raise TopologyError(f"the daemon refuses this rank: {message.reason}", remedy=message.remedy)
        elif isinstance(message, EpochAnnouncement):
            self._begin_epoch(message)
        elif isinstance(message, EpochMessage):
            self._receive_in_epoch(message, frame.body)
        else:
            raise ControlError(f"a {message.kind} message from the daemon")

    def _receive_in_epoch(self, message: EpochMessage, body: Bytes) -> None:
        if self._epoch is None or message.fence != self._epoch.fence:
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
        elif isinstance(message, RowsPiece):
            self._add_to_chunk(body)
        elif isinstance(message, ListRequest):
            self._listing, self._listing_until = message, time.monotonic() + self._timeout
        elif isinstance(message, TapState) and self._tap is not None:
            self._tap.record_state(message)
        else:
            raise ControlError(f"a {message.kind} message from the daemon")

    def _register(self, notice: DaemonNotice) -> None:
        context = self._context
        if self._instance:
            raise StaleMessageError("a second notice of the daemon")
        if notice.job != self._me.job:
            raise StaleMessageError(f"the daemon serves job {notice.job!r}, not {self._me.job!r}")
        self._instance = notice.instance
        context.counters["connects"] += 1
        if context.lost_at is not None:
            level = logging.WARNING if context.warned_of_loss else logging.INFO
            away = time.monotonic() - context.lost_at
            logger.log(level, "rank %d: the daemon is back after %.0f s", self._me.rank, away)
            context.lost_at, context.warned_of_loss = None, False
        context.state = "waiting for the other ranks"
        self._settle()
        if notice.table_digest != self._me.table_digest:
            self._send(TableList(self._instance, self._me.table_digest), tables_body(self._options.tables))
        self._hello()

    def _settle(self) -> None:
        """Drop the chunks that are not agreed; waits for the exchange of the running step."""
        self._agreed = PlacementState(*self._inbox.settle(self._timeout))
        # The daemon's messages wait meanwhile: that is no silence of the daemon.
        self._heard_at = time.monotonic()

    def _hello(self) -> None:
        self._send(
            Hello(
                self._me, self._instance, self._context.session, self._nonce, self._agreed, self._client.local_address
            )
        )

    def _begin_epoch(self, epoch: EpochAnnouncement) -> None:
        fence = epoch.fence
        if (
            self._epoch is not None
            or (fence.job, fence.attempt, epoch.nonce) != (self._me.job, self._me.attempt, self._nonce)
            or fence.epoch <= self._last_epoch
        ):
            raise StaleMessageError("an epoch of another daemon or registration")
        self._epoch = epoch
        self._last_epoch = fence.epoch
        self._context.state = f"settling for epoch {fence.epoch}"
        self._settle()
        self._send(Settled(fence, self._agreed, self._inbox.applied_version))

    def _join(self) -> None:
        context, fence = self._context, self._fence
        context.counters["epochs"] += 1
        context.state = f"joined epoch {fence.epoch}"
        context.last_logged = ""
        self._joined = True
        if context.outbox is not None:
            self._tap = TapSender(context.outbox, fence, self._me.rank, self._send)

    def _end_epoch(self) -> None:
        self._epoch, self._joined, self._tap = None, False, None
        self._chunk = self._listing = None
        self._context.state = "waiting for the other ranks"

    def _answer(self, request: ListRequest) -> None:
        """List the rows if the requested version is applied, or say that it is not once it takes too long."""
        applied = self._inbox.applied_version
        if applied != request.version and time.monotonic() < self._listing_until:
            return
        self._listing = None
        keys, tiers = np.empty(0, np.int64), np.empty(0, np.uint8)
        error = f"version {applied} is applied, not {request.version}: training does not step"
        if applied == request.version:
            error = ""
            try:
                keys, tiers = self._options.lists()
            except Exception as failure:
                logger.warning("rank %d: its placement cannot be listed", self._me.rank, exc_info=failure)
                error = named_error(failure)
        first, *others = pieces_of(rows_body(keys, tiers))
        self._send(Listing(self._fence, request.version, len(keys), error), first)
        for piece in others:
            self._send(RowsPiece(self._fence), piece)

    def _begin_chunk(self, header: ChunkHeader, body: Bytes) -> None:
        if self._chunk is not None:
            raise ControlError(f"chunk {header.version} before chunk {self._chunk[0].version} is complete")
        self._chunk = header, RowsAssembly(header.rows, 2)
        self._add_to_chunk(body)

    def _add_to_chunk(self, body: Bytes) -> None:
        if self._chunk is None:
            raise ControlError("rows of no chunk")
        header, assembly = self._chunk
        if not assembly.add(body):
            return
        self._chunk = None
        try:
            self._offer(header, assembly)
        except ChunkRefusedError as error:
            self._refuse(error, header.version)
        except CHANNEL_ERRORS:
            raise
        except Exception as error:
            self._refuse(cannot_prepare(self._me.rank, header.version, error), header.version)

    def _offer(self, header: ChunkHeader, assembly: RowsAssembly) -> None:
        if self._refused_epoch == header.fence.epoch:
            return  # The daemon ends this epoch; chunks after a refused one cannot follow.
        keys, tiers = assembly.rows()
        self._inbox.offer(header.version, Delta(keys, tiers[: header.rows], tiers[header.rows :]))
        self._context.counters["chunks"] += 1

    def _prepare_next(self) -> bool:
        try:
            return self._inbox.prepare_next()
        except ChunkRefusedError as error:
            self._refuse(error)
            return False

    def _refuse(self, error: ChunkRefusedError, version: int = 0) -> None:
        """Refuse a chunk by name; the daemon ends the epoch and the migration."""
        self._refused_epoch = self._last_epoch
        self._context.counters["chunks_refused"] += 1
        logger.warning("rank %d: %s", self._me.rank, error)
        self._send(ChunkRefused(self._fence, error.version or version, str(error)[:1000]))

    def _send_progress(self, final: bool = False) -> None:
        assert self._epoch is not None  # noqa: S101
        now = time.monotonic()
        versions = (self._inbox.agreed_version, self._inbox.applied_version)
        due = now - self._reported_at >= self._epoch.report_seconds
        pending = self._context.reports.waiting and (final or (due and self._hears_the_daemon()))
        if not (pending or versions != self._sent_versions or now - self._sent_at >= self._heartbeat_seconds):
            return
        report = self._context.reports.drain() if pending else None
        progress = Progress(self._fence, *versions, report)
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
        self._context.counters["reports"] += report is not None

    def _drop_report(self, error: ControlError) -> None:
        """Drop a report that cannot be encoded: kept, it would be merged into the next, and end every connection."""
        context = self._context
        context.counters["reports_dropped"] += 1
        if context.counters["reports_dropped"] == 1:
            logger.warning(
                "rank %d: a report of training steps is dropped, the daemon lacks these steps: %s (logged once)",
                self._me.rank, error,
            )  # fmt: skip

    def _send(self, message: ControlMessage, body: Bytes = b"") -> None:
        self._send_encoded(encode(message), body)

    def _send_encoded(self, message: bytes, body: Bytes = b"") -> None:
        self._client.send(message, body)
        self._sent_at = time.monotonic()

    @property
    def _fence(self) -> Fence:
        assert self._epoch is not None  # noqa: S101
        return self._epoch.fence
