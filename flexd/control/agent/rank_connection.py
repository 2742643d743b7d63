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
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.agent.inbox import cannot_prepare
from flexd.control.agent.tap_outbox import TapSender
from flexd.control.protocol.handshake import CHANNEL_ERRORS, new_token
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
from flexd.control.protocol.report import PlacementState, StepReport, TrainingTotals, merge_reports, tables_body
from flexd.control.protocol.wire import Frame, clamp
from flexd.core.errors import (
    ChunkRefusedError,
    ControlError,
    StaleMessageError,
    TopologyError,
    UnknownMessageError,
    named_error,
)
from flexd.core.placement import Delta
from flexd.core.supervision import Backoff

if TYPE_CHECKING:
    from flexd.control.agent.agent import Agent

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
"""Longest time between two messages of a healthy rank; longer where the daemon asks for fewer reports."""

PlacementLists = Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]


class PendingReports:
    """Steps not reported yet, merged into one report when it is sent. ``add`` waits for a swap at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: StepReport | None = None
        # After the newest step, and after the newest that was reported.
        self._newest: TrainingTotals | None = None
        self._reported: TrainingTotals | None = None

    @property
    def waiting(self) -> bool:
        return self._pending is not None or self._newest is not self._reported

    def add(self, report: StepReport | None = None, totals: TrainingTotals | None = None) -> bool:
        """Add a report, the totals after a step, or both; True if nothing was waiting. Steps are reported from the
        first totals on. What a report has outside its bounds is clamped: a sum would keep it."""
        report = None if report is None else clamp(report)
        with self._lock:
            first = not self.waiting
            if totals is not None:
                self._newest, self._reported = totals, self._reported or totals
            if report is not None:
                self._pending = merge_reports(self._pending, report)
            return first

    def drain(self) -> StepReport | None:
        with self._lock:
            pending, self._pending = self._pending, None
            newest, reported = self._newest, self._reported
            self._reported = newest
        if newest is not None and reported is not None and newest is not reported:
            pending = merge_reports(pending, clamp(newest.report(reported)))
        return None if pending is None else clamp(pending)


class RankConnection:
    """Registers, waits for an epoch and serves it. Used once, by the agent's thread."""

    def __init__(self, agent: Agent, backoff: Backoff) -> None:
        self._agent = agent
        self._backoff = backoff
        self._inbox = agent.inbox
        self._timeout = agent.timeout_seconds
        self._me = agent.identity
        self._nonce = new_token()
        # Of the daemon; empty before its notice.
        self._instance = ""
        self._epoch: EpochAnnouncement | None = None
        self._last_epoch = 0
        self._refused_epoch = 0
        self._joined = False
        self._chunk: tuple[ChunkHeader, RowsAssembly] | None = None
        # Answered once every agreed chunk is applied; no chunk is pushed meanwhile.
        self._listing: ListRequest | None = None
        self._listing_until = 0.0
        self._tap: TapSender | None = None
        self._agreed = PlacementState(0, 0)
        self._heard_at = 0.0
        self._sent_at = 0.0
        self._reported_at = 0.0
        self._sent_versions = (-1, -1)

    def run(self) -> None:
        """Raises channel errors, TopologyError if the daemon refuses this rank; returns when stopping, and when the
        identity of the rank has changed, to register again."""
        agent = self._agent
        agent.state = "connecting"
        self._client = agent.client = ChannelClient.connect(*agent.address, agent.credentials, self._timeout)
        self._inbox.on_change = self._client.wake
        if agent.outbox is not None:
            agent.outbox.on_change = self._client.wake
        try:
            self._heard_at = self._sent_at = time.monotonic()
            while not agent.stopping.is_set() and agent.identity is self._me:
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
            agent.client = None
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
        if self._epoch is not None and self._agent.reports.waiting:
            until = min(until, self._reported_at + self._epoch.report_seconds)
        if self._listing is not None:
            until = min(until, self._listing_until)
        return max(until - time.monotonic(), 0.0)

    @property
    def _heartbeat_seconds(self) -> float:
        return HEARTBEAT_SECONDS if self._epoch is None else max(HEARTBEAT_SECONDS, self._epoch.report_seconds)

    def _receive(self, frame: Frame) -> None:
        try:
            message = decode(frame.message)
        except UnknownMessageError:
            self._agent.counters["unknown_messages"] += 1
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
            self._tap.state = message
        else:
            raise ControlError(f"a {message.kind} message from the daemon")

    def _register(self, notice: DaemonNotice) -> None:
        agent = self._agent
        if self._instance:
            raise StaleMessageError("a second notice of the daemon")
        if notice.job != self._me.job:
            raise StaleMessageError(f"the daemon serves job {notice.job!r}, not {self._me.job!r}")
        self._instance = notice.instance
        agent.counters["connects"] += 1
        if agent.lost_at is not None:
            level = logging.WARNING if agent.warned_of_loss else logging.INFO
            away = time.monotonic() - agent.lost_at
            logger.log(level, "rank %d: the daemon is back after %.0f s", self._me.rank, away)
            agent.lost_at, agent.warned_of_loss = None, False
        agent.state = "waiting for the other ranks"
        self._settle()
        if notice.table_digest != self._me.table_digest:
            self._send(TableList(self._instance, self._me.table_digest), tables_body(agent.tables))
        self._hello()

    def _settle(self) -> None:
        """Drop the chunks that are not agreed; waits for the exchange of the running step."""
        self._agreed = PlacementState(*self._inbox.settle(self._timeout))
        # The daemon's messages wait meanwhile: that is no silence of the daemon.
        self._heard_at = time.monotonic()

    def _hello(self) -> None:
        self._send(
            Hello(self._me, self._instance, self._agent.session, self._nonce, self._agreed, self._client.local_address)
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
        self._agent.state = f"settling for epoch {fence.epoch}"
        self._settle()
        self._send(Settled(fence, self._agreed, self._inbox.applied_version))

    def _join(self) -> None:
        agent, fence = self._agent, self._fence
        agent.counters["epochs"] += 1
        agent.state = f"joined epoch {fence.epoch}"
        agent.last_logged = ""
        self._joined = True
        if agent.outbox is not None:
            self._tap = TapSender(agent.outbox, fence, self._me.rank, self._send)

    def _end_epoch(self) -> None:
        self._epoch, self._joined, self._tap = None, False, None
        self._chunk = self._listing = None
        self._agent.state = "waiting for the other ranks"

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
                keys, tiers = self._agent.lists()
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
        if self._refused_epoch == header.fence.epoch:
            return  # The daemon ends this epoch; chunks after a refused one cannot follow.
        try:
            keys, tiers = assembly.rows()
            self._inbox.offer(header.version, Delta(keys, tiers[: header.rows], tiers[header.rows :]))
            self._agent.counters["chunks"] += 1
        except ChunkRefusedError as error:
            self._refuse(error, header.version)
        except CHANNEL_ERRORS:
            raise
        except Exception as error:
            self._refuse(cannot_prepare(self._me.rank, header.version, error), header.version)

    def _prepare_next(self) -> bool:
        try:
            return self._inbox.prepare_next()
        except ChunkRefusedError as error:
            self._refuse(error)
            return False

    def _refuse(self, error: ChunkRefusedError, version: int = 0) -> None:
        """Refuse a chunk by name; the daemon ends the epoch and the migration."""
        self._refused_epoch = self._last_epoch
        self._agent.counters["chunks_refused"] += 1
        logger.warning("rank %d: %s", self._me.rank, error)
        self._send(ChunkRefused(self._fence, error.version or version, str(error)[:1000]))

    def _send_progress(self, final: bool = False) -> None:
        assert self._epoch is not None  # noqa: S101
        now = time.monotonic()
        versions = (self._inbox.agreed_version, self._inbox.applied_version)
        due = final or now - self._reported_at >= self._epoch.report_seconds
        report = self._agent.reports.drain() if due else None
        if report is None and versions == self._sent_versions and now - self._sent_at < self._heartbeat_seconds:
            return
        self._send(Progress(self._fence, *versions, report))
        if versions[1] > self._sent_versions[1] >= 0:
            # Not when the epoch is joined: an epoch that ends at its first chunk would be joined again at full speed.
            self._backoff.reset()
        self._sent_versions = versions
        if report is not None:
            self._reported_at = self._sent_at
            self._agent.counters["reports"] += 1

    def _send(self, message: ControlMessage, body: Bytes = b"") -> None:
        self._client.send(encode(message), body)
        self._sent_at = time.monotonic()

    @property
    def _fence(self) -> Fence:
        assert self._epoch is not None  # noqa: S101
        return self._epoch.fence
