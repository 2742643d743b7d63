"""The ranks' side of the control channel: one background thread a rank, of which training never notices anything.

::

    connecting --(store, signed notice)--> waiting --(epoch with my nonce)--> settling --(go)--> joined
        ^                                    ^  ^                                 |                |
        |                                    |  `------(epoch ended by the daemon)-+----------------'
        `----(any error; back-off, new nonce)+----------------------------------------------------'

Whatever fails, the thread drops the group and the connection, waits a little and registers again. It holds the lock
that ``report`` takes only to swap a pointer, so no call from the training thread waits for the network.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.control.channel import (
    CHANNEL_ERRORS,
    Backoff,
    EpochGroup,
    Hint,
    Keys,
    address_towards,
    first_line,
    new_token,
    rows_sha256,
)
from flexd.control.inbox import ChunkInbox
from flexd.control.messages import (
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
from flexd.control.outbox import DeltaOutbox
from flexd.control.rendezvous import Rendezvous
from flexd.control.report import RankIdentity, StepReport, fold_reports
from flexd.control.shipper import DeltaShipper
from flexd.errors import (
    AuthenticationError,
    ChunkRefusedError,
    ControlError,
    StaleMessageError,
    TopologyError,
)
from flexd.placement import Delta
from flexd.secret import Secret

PlacementLists = Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.2
"""Shortest time between two step reports."""
HEARTBEAT_SECONDS = 1.0
"""Longest silence of a healthy rank."""
BUSY_SECONDS, BUSY_POLL_SECONDS = 0.5, 0.005
"""For so long after a chunk a rank looks for the next one this often."""
REFUSED_RETRY_SECONDS = 2.0
"""A rank that the daemon refused, or whose secret differs, asks again this slowly."""


class Agent:
    """Keeps one rank registered with the daemon, and its inbox fed.

    Args:
        inbox: the rank's; the agent owns its ``offer`` and ``settle``.
        identity: who this rank is; fixed for the life of the process.
        address: ``host:port`` of the daemon's control channel; several separated by commas, where several may lead.
        secret: the shared secret, or the file of it (read again when it changes); None only on loopback.
        timeout_seconds: deadline of every single wait on the network or on the running step's exchange.
        poll_seconds: how often the agent looks for news.
        placement_lists: returns (int64[n] keys, uint8[n] tiers) of the rows that this rank knows to be above HOME;
            the lists of all ranks of one node together must be the whole placement. Called from the agent's thread,
            only while no chunk is left to apply. Without it a daemon that lost its journal cannot take over this rank.
        outbox: counted accesses to ship (``flexd.Tap``), if any.

    Raises:
        ControlError: the address is malformed.
    """

    def __init__(
        self,
        inbox: ChunkInbox,
        identity: RankIdentity,
        address: str,
        secret: Secret = None,
        timeout_seconds: float = 15.0,
        poll_seconds: float = 0.05,
        placement_lists: PlacementLists | None = None,
        outbox: DeltaOutbox | None = None,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._identity = identity
        self._rendezvous = Rendezvous(address, identity.job, timeout_seconds)
        self._signer = Signer(secret)
        self._timeout = timeout_seconds
        self._poll = poll_seconds
        self._lists = placement_lists
        self._session = new_token()
        self._sequence = 0
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._pending: StepReport | None = None
        self._counters: Counter[str] = Counter()
        self._state = "not started"
        self._last_logged = ""
        self._thread = threading.Thread(target=self._run, name=f"flexd-agent-{identity.rank}", daemon=True)

    @property
    def state(self) -> str:
        """What the agent is doing, for people."""
        return self._state

    @property
    def counters(self) -> dict[str, int]:
        """Since the start: connects, epochs, chunks, reports, errors, and messages refused by kind."""
        return dict(self._counters)

    def start(self) -> None:
        """Returns at once, whether there is a daemon or not."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Sends what is pending and ends the thread; False if it did not end within the deadline (it is a daemon
        thread, so it does not keep the process alive)."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def report(self, report: StepReport) -> None:
        """From the training thread; never waits on the network. Reports not sent yet are folded into one."""
        with self._lock:
            self._pending = fold_reports(self._pending, report)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            wait = 0.0
            try:
                _Connection(self, backoff).run()
            except (TopologyError, AuthenticationError) as error:
                self._note("refused", error)
                wait = REFUSED_RETRY_SECONDS
            except CHANNEL_ERRORS as error:
                self._note("connecting", error)
            except Exception as error:
                # This thread must outlive every surprise, a placement_lists that breaks included.
                logger.exception("rank %d: control agent: unexpected error", self._identity.rank)
                self._note("connecting", error)
            self._stopping.wait(max(wait, backoff.seconds() if self._rendezvous.tried_all else 0.0))
        self._state = "stopped"

    def _note(self, state: str, error: Exception) -> None:
        text = first_line(error)
        self._count("stale" if isinstance(error, StaleMessageError) else _error_kind(error))
        self._state = f"{state}: {text}"
        # The same trouble is logged once, not at every retry.
        level = logging.DEBUG if text == self._last_logged else logging.WARNING
        self._last_logged = text
        logger.log(level, "rank %d: control channel: %s", self._identity.rank, text)

    def _count(self, what: str, by: int = 1) -> None:
        self._counters[what] += by

    def _take_pending(self) -> StepReport | None:
        with self._lock:
            pending, self._pending = self._pending, None
        return pending

    def _put_back(self, report: StepReport) -> None:
        with self._lock:
            self._pending = report if self._pending is None else fold_reports(report, self._pending)


def _error_kind(error: Exception) -> str:
    if isinstance(error, AuthenticationError):
        return "forged"
    return "identity_refused" if isinstance(error, TopologyError) else "errors"


class _Connection:
    """One connection to one instance of the daemon, from the notice to the first error."""

    def __init__(self, agent: Agent, backoff: Backoff) -> None:
        self._agent = agent
        self._backoff = backoff
        self._inbox = agent._inbox
        self._me = agent._identity
        self._signer = agent._signer
        self._nonce = new_token()
        self._last_epoch = 0
        self._last_sent_at = 0.0
        self._last_report_at = 0.0
        self._last_command_at = 0.0
        self._last_told = (-1, -1)
        self._last_turn = b""

    def run(self) -> None:
        agent = self._agent
        agent._state = "connecting"
        self._store, self._daemon = agent._rendezvous.connect()
        try:
            self._register()
            while not agent._stopping.is_set():
                announcement = self._await_epoch()
                if announcement is not None:
                    self._in_epoch(announcement)
        finally:
            self._store.close()

    def _register(self) -> None:
        agent = self._agent
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
        agent._rendezvous.follow(notice)
        self._instance, self._term = notice.instance, notice.term
        agent._count("connects")
        self._version, self._digest = self._inbox.settle(agent._timeout)
        self._hello()

    def _hello(self) -> None:
        me = self._me
        self._push(
            Hello(
                job=me.job, instance=self._instance, attempt=me.attempt, rank=me.rank, world_size=me.world_size,
                nodes=me.nodes, local_ranks=me.local_ranks, replica_slots=me.replica_slots,
                table_digest=me.table_digest, session=self._agent._session, nonce=self._nonce,
                sequence=self._next_sequence(), agreed_version=self._version, agreed_digest=self._digest,
                address=self._local_address, can_list=self._agent._lists is not None,
            )
        )  # fmt: skip

    def _await_epoch(self) -> EpochAnnouncement | None:
        """The next epoch that lists this registration; None when stopping."""
        self._agent._state = "waiting for the other ranks"
        while not self._agent._stopping.is_set():
            hinted = self._hint().epoch
            if hinted == self._last_epoch != 0:
                # Hints are not signed. Registered anew, this rank gets an epoch that it is in; else both would wait.
                raise StaleMessageError(f"the daemon goes on with epoch {hinted}, which a hint had ended")
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
            self._agent._stopping.wait(self._agent._poll)
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
        """Settles, joins, and serves until the daemon ends the epoch (returns) or something fails (raises)."""
        agent = self._agent
        self._epoch = epoch
        self._last_epoch = epoch.epoch
        agent._state = f"settling for epoch {epoch.epoch}"
        self._version, self._digest = self._inbox.settle(agent._timeout)
        self._push(
            Settled(
                **self._fence(), rank=self._me.rank, sequence=self._next_sequence(), agreed_version=self._version,
                agreed_digest=self._digest, applied_version=self._inbox.applied_version,
            )
        )  # fmt: skip
        while not (hint := self._hint()).go:
            if hint.epoch != epoch.epoch or agent._stopping.wait(agent._poll):
                return
            self._send_progress()
        if hint.epoch != epoch.epoch:
            return
        group = self._store.call(
            lambda store: EpochGroup(
                store, epoch.epoch, self._me.rank, self._me.world_size, self._local_address, agent._timeout
            ),
            patience=2.0,
        )
        agent._count("epochs")
        agent._state = f"joined epoch {epoch.epoch}"
        self._agent._last_logged = ""
        self._backoff.reset()
        done = 0
        shipper = self._shipper()
        while (hint := self._hint()).epoch == epoch.epoch:
            while done < hint.commands:
                done += 1
                self._command(group, done)
                self._last_command_at = time.monotonic()
            self._send_progress()
            busy = time.monotonic() - self._last_command_at < BUSY_SECONDS
            busy |= self._inbox.prepare_next()
            if shipper is not None:
                busy |= shipper.turn()
            if agent._stopping.wait(min(agent._poll, BUSY_POLL_SECONDS) if busy else agent._poll):
                self._send_progress(final=True)
                return

    def _shipper(self) -> DeltaShipper | None:
        agent = self._agent
        if agent._outbox is None:
            return None
        return DeltaShipper(
            agent._outbox, self._signer, self._store, self._fence(), self._me.rank, agent._session, self._push,
            self._next_sequence,
        )  # fmt: skip

    def _command(self, group: EpochGroup, number: int) -> None:
        key = Keys.command(self._epoch.epoch, number)
        if not self._store.check(key):
            raise StaleMessageError(f"command {number} of epoch {self._epoch.epoch} is gone")
        message = self._signer.open(self._store.get(key))
        if not isinstance(message, ChunkHeader | ListRequest) or message.command != number:
            raise StaleMessageError(f"a {message.kind} message where command {number} belongs")
        if self._fence_of(message) != self._fence():
            raise StaleMessageError(f"a {message.kind} message of another attempt, generation or epoch")
        if isinstance(message, ChunkHeader):
            self._chunk(group, message)
        elif self._me.rank in message.ranks:
            self._list(group, message)

    def _chunk(self, group: EpochGroup, header: ChunkHeader) -> None:
        keys, tiers = group.receive(header.rows, 2 * header.rows)
        if rows_sha256(keys, tiers) != header.sha256:
            self._agent._count("tampered")
            raise AuthenticationError(
                f"chunk {header.version}: the rows received are not the rows announced",
                remedy="look for a fault or an intruder on the control network",
            )
        try:
            self._inbox.offer(header.version, Delta(keys, tiers[: header.rows], tiers[header.rows :]))
            self._agent._count("chunks")
        except ChunkRefusedError as error:
            self._agent._count("chunks_refused")
            logger.warning("rank %d: %s", self._me.rank, error)
            self._push(
                ChunkRefused(
                    **self._fence(), rank=self._me.rank, sequence=self._next_sequence(), version=header.version,
                    reason=str(error)[:1000],
                )
            )  # fmt: skip

    def _list(self, group: EpochGroup, request: ListRequest) -> None:
        """Answers with the rows above HOME, once every agreed chunk is applied (no chunk is pushed meanwhile)."""
        keys, tiers = np.empty(0, np.int64), np.empty(0, np.uint8)
        error = ""
        deadline = time.monotonic() + self._agent._timeout
        while self._inbox.applied_version != request.version and time.monotonic() < deadline:
            if self._agent._stopping.wait(self._agent._poll):
                return
            self._send_progress()
        if self._agent._lists is None:
            error = "this rank's agent was not given placement_lists"
        elif self._inbox.applied_version != request.version:
            error = f"version {self._inbox.applied_version} is applied, not {request.version}: training does not move"
        else:
            keys, tiers = self._agent._lists()
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
        told = (self._inbox.agreed_version, self._inbox.applied_version)
        since = time.monotonic() - self._last_sent_at
        due = time.monotonic() - self._last_report_at >= REPORT_SECONDS
        pending = self._agent._pending is not None and (final or (due and self._is_read()))
        if not (pending or told != self._last_told or since >= HEARTBEAT_SECONDS):
            return
        report = self._agent._take_pending() if pending else None
        try:
            self._push(
                Progress(
                    **self._fence(), rank=self._me.rank, sequence=self._next_sequence(), agreed_version=told[0],
                    applied_version=told[1], report=report,
                )
            )  # fmt: skip
        except CHANNEL_ERRORS:
            if report is not None:
                self._agent._put_back(report)
            raise
        self._last_told = told
        if report is not None:
            self._last_report_at = self._last_sent_at
        self._agent._count("reports", 1 if report is not None else 0)

    def _is_read(self) -> bool:
        """Has the daemon looked at its queue since this rank's last report? If not, the report waits, folded with
        those that follow: the queue stays bounded whatever holds the daemon up."""
        turn, last = self._store.get(Keys.TURN), self._last_turn
        self._last_turn = turn
        return turn != last

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
        self._agent._sequence += 1
        return self._agent._sequence

    def _fence(self) -> dict[str, Any]:
        return self._fence_of(self._epoch)

    @staticmethod
    def _fence_of(message: EpochMessage | EpochAnnouncement) -> dict[str, Any]:
        return {name: getattr(message, name) for name in ("job", "attempt", "generation", "epoch", "token", "term")}
