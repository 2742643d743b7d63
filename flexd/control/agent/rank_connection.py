"""One rank's connection to one instance of the daemon, from the signed notice to the first error.

::

    connecting --(store, signed notice)--> waiting --(epoch with its nonce)-> settling --(go)--> joined
        ^                                    ^  ^                                 |                |
        |                                    |  `------(epoch ended by the daemon)-+----------------'
        `----(any error; back-off, new nonce)+----------------------------------------------------'
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.control.agent.inbox import ChunkInbox, cannot_prepare
from flexd.control.agent.rendezvous import Rendezvous
from flexd.control.agent.tap_outbox import TapOutbox
from flexd.control.agent.tap_sender import TapSender
from flexd.control.protocol.epoch_group import EpochGroup, rows_sha256
from flexd.control.protocol.messages import (
    ChunkHeader,
    ChunkRefused,
    DaemonNotice,
    EpochAnnouncement,
    EpochMessage,
    Hello,
    HelloRefused,
    Listing,
    ListRequest,
    Message,
    Progress,
    Settled,
    Signer,
)
from flexd.control.protocol.network import CHANNEL_ERRORS, Backoff, address_towards, new_token
from flexd.control.protocol.report import PendingReports, RankIdentity
from flexd.control.protocol.store_keys import Hint, Keys
from flexd.control.protocol.table_lists import table_entries
from flexd.core.errors import (
    AuthenticationError,
    ChunkRefusedError,
    ControlError,
    StaleMessageError,
    TopologyError,
    UnknownMessageError,
)
from flexd.core.placement import Delta

PlacementLists = Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.2
"""Shortest time between two step reports."""
HEARTBEAT_SECONDS = 1.0
"""Longest time between two messages of a healthy rank."""
BUSY_SECONDS, BUSY_POLL_SECONDS = 0.5, 0.005
"""For ``BUSY_SECONDS`` after a chunk a rank polls every ``BUSY_POLL_SECONDS``."""


@dataclass
class AgentContext:
    """State that a rank keeps from one connection to the next. Shared by the agent's callers and its thread.

    Attributes:
        session: identifies this process; no two launches of a rank have the same.
        sequence: of the newest message sent, in the whole session.
        state: the present activity or problem, in words.
        last_logged: the newest failure, which is not logged twice.
    """

    inbox: ChunkInbox
    identity: RankIdentity
    rendezvous: Rendezvous
    signer: Signer
    timeout_seconds: float
    poll_seconds: float
    lists: PlacementLists | None
    outbox: TapOutbox | None
    reports: PendingReports = field(default_factory=PendingReports)
    stopping: threading.Event = field(default_factory=threading.Event)
    counters: Counter[str] = field(default_factory=Counter)
    session: str = field(default_factory=new_token)
    sequence: int = 0
    state: str = "not started"
    last_logged: str = ""

    def count(self, what: str, by: int = 1) -> None:
        self.counters[what] += by


class RankConnection:
    """Registers, waits for an epoch and serves it. Used once, by the agent's thread."""

    def __init__(self, context: AgentContext, backoff: Backoff) -> None:
        self._context = context
        self._backoff = backoff
        self._inbox = context.inbox
        self._me = context.identity
        self._signer = context.signer
        self._nonce = new_token()
        self._last_epoch = 0
        self._refused_epoch = 0
        self._last_sent_at = 0.0
        self._last_report_at = 0.0
        self._last_command_at = 0.0
        self._last_sent = (-1, -1)
        self._last_polls = b""

    def run(self) -> None:
        context = self._context
        context.state = "connecting"
        self._store, self._daemon = context.rendezvous.connect()
        try:
            self._register()
            while not context.stopping.is_set():
                announcement = self._await_epoch()
                if announcement is not None:
                    self._in_epoch(announcement)
        finally:
            self._store.close()

    def _register(self) -> None:
        context = self._context
        host, port = self._daemon
        self._local_address = address_towards(host, port)
        if not self._store.check(Keys.NOTICE):
            raise ControlError(
                f"the store at {host}:{port} has no flexd daemon of job {self._me.job!r}",
                remedy="give trainer and daemon the same job name",
            )
        notice = self._signer.open_as(DaemonNotice, self._store.get(Keys.NOTICE))
        if notice.job != self._me.job:
            raise StaleMessageError(f"the daemon serves job {notice.job!r}, not {self._me.job!r}")
        context.rendezvous.check_term(notice)
        self._instance, self._term = notice.instance, notice.term
        self._tables = () if notice.table_digest == self._me.table_digest else table_entries(self._me.tables)
        context.count("connects")
        self._version, self._digest = self._inbox.settle(context.timeout_seconds)
        self._hello()

    def _hello(self) -> None:
        me = self._me
        self._push(
            Hello(
                job=me.job, instance=self._instance, attempt=me.attempt, rank=me.rank, world_size=me.world_size,
                nodes=me.nodes, local_ranks=me.local_ranks, replica_slots=me.replica_slots,
                table_digest=me.table_digest, session=self._context.session, nonce=self._nonce,
                sequence=self._next_sequence(), agreed_version=self._version, agreed_digest=self._digest,
                address=self._local_address, can_list=self._context.lists is not None,
                tables=self._tables, table_count=len(me.tables),
            )
        )  # fmt: skip

    def _await_epoch(self) -> EpochAnnouncement | None:
        """Wait for the next epoch that lists this registration; None when stopping."""
        self._context.state = "waiting for the other ranks"
        while not self._context.stopping.is_set():
            hinted = self._hint().epoch
            if hinted == self._last_epoch != 0:
                # Hints are not signed. A new registration gets a new epoch; without it both sides would wait.
                raise StaleMessageError(f"the daemon continues epoch {hinted}, which a hint had ended")
            if hinted > self._last_epoch:
                announcement = self._signer.open_as(EpochAnnouncement, self._store.get(Keys.EPOCH))
                if self._is_for_me(announcement):
                    return announcement
            refused = Keys.refused(self._nonce)
            if self._store.check(refused):
                refusal = self._signer.open_as(HelloRefused, self._store.get(refused))
                self._store.delete_key(refused)
                if refusal.instance == self._instance and refusal.nonce == self._nonce:
                    raise TopologyError(f"the daemon refuses this rank: {refusal.reason}", remedy=refusal.remedy)
            if time.monotonic() - self._last_sent_at > HEARTBEAT_SECONDS:
                self._hello()
            self._context.stopping.wait(self._context.poll_seconds)
        return None

    def _is_for_me(self, announcement: EpochAnnouncement) -> bool:
        nonces = announcement.nonces
        return (
            announcement.job == self._me.job
            and (announcement.instance, announcement.term) == (self._instance, self._term)
            and announcement.attempt == self._me.attempt
            and announcement.epoch > self._last_epoch
            and len(nonces) == self._me.world_size
            and nonces[self._me.rank] == self._nonce
        )

    def _in_epoch(self, epoch: EpochAnnouncement) -> None:
        """Settle, join, and serve until the daemon ends the epoch (returns) or something fails (raises)."""
        context = self._context
        self._epoch = epoch
        self._last_epoch = epoch.epoch
        context.state = f"settling for epoch {epoch.epoch}"
        self._version, self._digest = self._inbox.settle(context.timeout_seconds)
        self._push(
            Settled(
                **self._fence(), rank=self._me.rank, sequence=self._next_sequence(), agreed_version=self._version,
                agreed_digest=self._digest, applied_version=self._inbox.applied_version,
            )
        )  # fmt: skip
        while not (hint := self._hint()).go:
            if hint.epoch != epoch.epoch or context.stopping.wait(context.poll_seconds):
                return
            self._send_progress()
        if hint.epoch != epoch.epoch:
            return
        group = self._store.call(
            lambda store: EpochGroup(
                store, epoch.epoch, self._me.rank, self._me.world_size, self._local_address, context.timeout_seconds
            ),
            patience=2.0,
        )
        context.count("epochs")
        context.state = f"joined epoch {epoch.epoch}"
        context.last_logged = ""
        done = 0
        tap_sender = self._tap_sender()
        while (hint := self._hint()).epoch == epoch.epoch:
            while done < hint.commands:
                done += 1
                self._command(group, done)
                self._last_command_at = time.monotonic()
            self._send_progress()
            busy = time.monotonic() - self._last_command_at < BUSY_SECONDS
            busy |= self._prepare_next()
            if tap_sender is not None:
                busy |= tap_sender.advance()
            if context.stopping.wait(min(context.poll_seconds, BUSY_POLL_SECONDS) if busy else context.poll_seconds):
                self._send_progress(final=True)
                return

    def _tap_sender(self) -> TapSender | None:
        context = self._context
        if context.outbox is None:
            return None
        return TapSender(
            context.outbox, self._signer, self._store, self._fence(), self._me.rank, context.session, self._push,
            self._next_sequence,
        )  # fmt: skip

    def _command(self, group: EpochGroup, number: int) -> None:
        key = Keys.command(self._epoch.epoch, number)
        if not self._store.check(key):
            raise StaleMessageError(f"command {number} of epoch {self._epoch.epoch} is not in the store")
        try:
            message = self._signer.open(self._store.get(key))
        except UnknownMessageError:
            self._context.count("unknown_messages")
            return
        if not isinstance(message, ChunkHeader | ListRequest) or message.command != number:
            raise StaleMessageError(f"a {message.kind} message where command {number} belongs")
        if self._fence_of(message) != self._fence():
            raise StaleMessageError(f"a {message.kind} message of another attempt, generation or epoch")
        if isinstance(message, ChunkHeader):
            self._chunk(group, message)
        elif self._me.rank in message.ranks:
            self._list(group, message)

    def _chunk(self, group: EpochGroup, header: ChunkHeader) -> None:
        """Put a chunk into the inbox, or refuse it by name, whatever is wrong with it or with this rank."""
        try:
            self._receive_chunk(group, header)
        except ChunkRefusedError as error:
            self._refuse(error, header.version)
        except CHANNEL_ERRORS:
            raise
        except Exception as error:
            self._refuse(cannot_prepare(self._me.rank, header.version, error), header.version)

    def _receive_chunk(self, group: EpochGroup, header: ChunkHeader) -> None:
        keys, tiers = group.receive(header.rows, 2 * header.rows)
        if rows_sha256(keys, tiers) != header.sha256:
            self._context.count("tampered")
            raise AuthenticationError(
                f"chunk {header.version}: the rows received are not the rows announced",
                remedy="look for a fault or an intruder on the control network",
            )
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
        self._refused_epoch = self._epoch.epoch
        self._context.count("chunks_refused")
        logger.warning("rank %d: %s", self._me.rank, error)
        self._push(
            ChunkRefused(
                **self._fence(), rank=self._me.rank, sequence=self._next_sequence(), version=error.version or version,
                reason=str(error)[:1000],
            )
        )  # fmt: skip

    def _list(self, group: EpochGroup, request: ListRequest) -> None:
        """Send the rows above HOME, once every agreed chunk is applied (no chunk is pushed meanwhile)."""
        keys, tiers = np.empty(0, np.int64), np.empty(0, np.uint8)
        error = ""
        deadline = time.monotonic() + self._context.timeout_seconds
        while self._inbox.applied_version != request.version and time.monotonic() < deadline:
            if self._context.stopping.wait(self._context.poll_seconds):
                return
            self._send_progress()
        if self._context.lists is None:
            error = "this rank's agent was not given placement_lists"
        elif self._inbox.applied_version != request.version:
            error = f"version {self._inbox.applied_version} is applied, not {request.version}: training does not step"
        else:
            keys, tiers = self._context.lists()
            keys, tiers = np.ascontiguousarray(keys, np.int64), np.ascontiguousarray(tiers, np.uint8)
        self._push(
            Listing(
                **self._fence(), rank=self._me.rank, sequence=self._next_sequence(), version=request.version,
                rows=len(keys), sha256=rows_sha256(keys, tiers), error=error,
            )
        )  # fmt: skip
        if not error:
            group.send_to_daemon(keys, tiers)

    def _send_progress(self, final: bool = False) -> None:
        versions = (self._inbox.agreed_version, self._inbox.applied_version)
        since = time.monotonic() - self._last_sent_at
        due = time.monotonic() - self._last_report_at >= REPORT_SECONDS
        pending = self._context.reports.waiting and (final or (due and self._daemon_has_polled()))
        if not (pending or versions != self._last_sent or since >= HEARTBEAT_SECONDS):
            return
        report = self._context.reports.drain() if pending else None
        try:
            self._push(
                Progress(
                    **self._fence(), rank=self._me.rank, sequence=self._next_sequence(), agreed_version=versions[0],
                    applied_version=versions[1], report=report,
                )
            )  # fmt: skip
        except CHANNEL_ERRORS:
            if report is not None:
                self._context.reports.restore(report)
            raise
        if versions[1] > self._last_sent[1] >= 0:
            # Not when the epoch is joined: an epoch that ends at its first chunk would be joined again at full speed.
            self._backoff.reset()
        self._last_sent = versions
        if report is not None:
            self._last_report_at = self._last_sent_at
        self._context.count("reports", 1 if report is not None else 0)

    def _daemon_has_polled(self) -> bool:
        """True if the daemon has polled its queue since this rank's last report.

        If not, the report waits, merged with those that follow, so that the queue stays bounded.
        """
        polls, last = self._store.get(Keys.POLLS), self._last_polls
        self._last_polls = polls
        return polls != last

    def _push(self, message: Message) -> None:
        try:
            text = self._signer.seal(message)
        except ValueError as error:
            raise ControlError(f"a {message.kind} message cannot be sent: {error}") from error
        self._store.queue_push(Keys.INBOUND, text)
        self._last_sent_at = time.monotonic()

    def _hint(self) -> Hint:
        return Hint.parse(self._store.get(Keys.HINT))

    def _next_sequence(self) -> int:
        self._context.sequence += 1
        return self._context.sequence

    def _fence(self) -> dict[str, Any]:
        return self._fence_of(self._epoch)

    @staticmethod
    def _fence_of(message: EpochMessage | EpochAnnouncement) -> dict[str, Any]:
        return {name: getattr(message, name) for name in ("job", "attempt", "generation", "epoch", "token", "term")}
