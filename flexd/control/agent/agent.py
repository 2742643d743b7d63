"""The ranks' side of the control channel: one background thread per rank, which never delays training.

When anything fails in a connection (see ``rank_connection``), the thread closes it, waits and registers again.
It holds the lock that ``report`` acquires only to swap a pointer, so no call from the training thread waits for the
network.
"""

import logging
import threading
import time
from collections import Counter
from dataclasses import replace

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.agent.inbox import ChunkInbox
from flexd.control.agent.rank_connection import PendingReports, PlacementLists, RankConnection
from flexd.control.agent.tap_outbox import TapOutbox
from flexd.control.protocol.handshake import (
    CHANNEL_ERRORS,
    ChannelCredentials,
    TlsFiles,
    new_token,
    parse_address,
    reconnect_backoff,
)
from flexd.control.protocol.messages import RankIdentity
from flexd.control.protocol.report import StepReport, TrainerSettings, TrainingTotals
from flexd.core.errors import AuthenticationError, StaleMessageError, TopologyError, first_line
from flexd.core.keyspace import TableSpec
from flexd.core.secrets import Secret

logger = logging.getLogger(__name__)

QUIET_SECONDS = 30.0
"""A daemon that a rank was connected to may be away for so long (a restart, an upgrade) without a warning."""
REFUSED_RETRY_SECONDS = 2.0
"""Time after which a rank that was refused, or whose secret differs, registers again."""


class Agent:
    """Keeps one rank registered with the daemon, and its inbox fed.

    Args:
        inbox: of the rank; only the agent calls its ``offer`` and ``settle``.
        identity: of the rank; fixed for the life of the process, but for ``change_settings``.
        address: ``host:port`` of the daemon's control channel.
        placement_lists: returns (int64[n] keys, uint8[n] tiers) of the rows above HOME that this rank lists;
            the lists of all ranks of one node together must be the whole placement. Called from the agent's thread,
            only while no chunk is left to apply.
        secret: the shared secret, or its file (read again when it changes); None only on loopback.
        timeout_seconds: deadline of every single wait on the network or on the running step's exchange, and the silence
            after which the daemon is given up.
        outbox: counted accesses to send (``flexd.Tap``), if any.
        tls: certificates of this rank, for a daemon with ``control.tls``.
        tables: of the trainer, in the order of the key space.

    Attributes:
        state: the present activity or problem, in words.
        counters: since the start: connects, epochs, chunks, reports, errors, and messages refused by kind.
        session: identifies this process; no two launches of a rank have the same.
        last_logged: the newest failure, which is not logged twice.
        client: the connection in use, if any.
        lost_at: when the daemon was lost that this rank was connected to; None while there is one.
        warned_of_loss: a warning of it was logged.

    Raises:
        ControlError: the address is malformed.
    """

    def __init__(
        self,
        inbox: ChunkInbox,
        identity: RankIdentity,
        address: str,
        placement_lists: PlacementLists,
        secret: Secret = None,
        timeout_seconds: float = 15.0,
        outbox: TapOutbox | None = None,
        tls: TlsFiles | None = None,
        tables: tuple[TableSpec, ...] = (),
    ) -> None:
        self.inbox = inbox
        self.identity = identity
        self.address = parse_address(address)
        self.lists = placement_lists
        self.credentials = ChannelCredentials(secret, tls)
        self.timeout_seconds = timeout_seconds
        self.outbox = outbox
        self.tables = tables
        self.reports = PendingReports()
        self.stopping = threading.Event()
        self.counters: Counter[str] = Counter()
        self.session = new_token()
        self.state = "not started"
        self.last_logged = ""
        self.client: ChannelClient | None = None
        self.lost_at: float | None = None
        self.warned_of_loss = False
        self._thread = threading.Thread(target=self._run, name=f"flexd-agent-{identity.rank}", daemon=True)

    def wake(self) -> None:
        """Make the agent's thread look for something to do. From any thread; never waits."""
        client = self.client
        if client is not None:
            client.wake()

    def change_settings(self, trainer: TrainerSettings) -> None:
        """Register again, with other settings of the trainer. From any thread; never waits."""
        self.identity = replace(self.identity, trainer=trainer)
        self.wake()

    def start(self) -> None:
        """Start the thread; does not wait for a daemon."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Send what is pending and end the thread; False if it did not end within the deadline.

        It is a daemon thread, so it does not keep the process alive.
        """
        self.stopping.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def report(self, report: StepReport | None = None, totals: TrainingTotals | None = None) -> None:
        """Add a report, the totals after a step, or both, from any thread; never waits on the network. What is not sent
        yet is merged into one report."""
        if self.reports.add(report, totals):
            self.wake()

    @property
    def report_waiting(self) -> bool:
        """True if a report was added and not sent yet."""
        return self.reports.waiting

    def _run(self) -> None:
        backoff = reconnect_backoff()
        while not self.stopping.is_set():
            wait = 0.0
            try:
                RankConnection(self, backoff).run()
            except (TopologyError, AuthenticationError) as error:
                self._record_failure("refused", error)
                wait = REFUSED_RETRY_SECONDS
            except Exception as error:
                # This thread must outlive every unexpected error, also of placement_lists.
                if not isinstance(error, CHANNEL_ERRORS) and first_line(error) != self.last_logged:
                    logger.exception("rank %d: control agent: unexpected error", self.identity.rank)
                self._record_failure("connecting", error)
            self.stopping.wait(max(wait, backoff.seconds()))
        self.state = "stopped"

    def _record_failure(self, state: str, error: Exception) -> None:
        text = first_line(error)
        self.counters[_error_kind(error)] += 1
        self.state = f"{state}: {text}"
        if state == "connecting" and self.counters["connects"] and isinstance(error, CHANNEL_ERRORS):
            self._log_lost(text)
            return
        # The same failure is logged once, not at every retry.
        level = logging.DEBUG if text == self.last_logged else logging.WARNING
        self.last_logged = text
        logger.log(level, "rank %d: control channel: %s", self.identity.rank, text)

    def _log_lost(self, text: str) -> None:
        """Log that the daemon is away: what a restart causes is no fault of this rank, and needs no advice."""
        now = time.monotonic()
        if self.lost_at is None:
            self.lost_at = now
            logger.info("rank %d: the daemon is away (%s); training goes on", self.identity.rank, text)
        elif now - self.lost_at > QUIET_SECONDS and not self.warned_of_loss:
            self.warned_of_loss = True
            logger.warning(
                "rank %d: control channel: no daemon for %.0f s: %s; training goes on, with the placement that it has",
                self.identity.rank, now - self.lost_at, text,
            )  # fmt: skip


def _error_kind(error: Exception) -> str:
    if isinstance(error, AuthenticationError):
        return "forged"
    if isinstance(error, StaleMessageError):
        return "stale"
    return "identity_refused" if isinstance(error, TopologyError) else "errors"
