"""The ranks' side of the control channel: one background thread per rank, which never delays training.

When anything fails in a connection (see ``rank_connection``), the thread closes it, waits and registers again.
It holds the lock that ``report`` acquires only to swap a pointer, so no call from the training thread waits for the
network.
"""

from __future__ import annotations

import logging
import threading
import time

from flexd.control.agent.inbox import ChunkInbox
from flexd.control.agent.rank_connection import AgentContext, AgentOptions, PlacementLists, RankConnection
from flexd.control.agent.tap_outbox import TapOutbox
from flexd.control.protocol.handshake import (
    CHANNEL_ERRORS,
    ChannelCredentials,
    TlsFiles,
    first_line,
    parse_address,
    reconnect_backoff,
)
from flexd.control.protocol.messages import RankIdentity
from flexd.control.protocol.report import StepReport
from flexd.core.errors import AuthenticationError, StaleMessageError, TopologyError
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
        identity: of the rank; fixed for the life of the process.
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
        options = AgentOptions(
            identity, parse_address(address), ChannelCredentials(secret, tls), placement_lists, timeout_seconds, tables
        )
        self._context = AgentContext(options, inbox, outbox)
        self._rank = identity.rank
        inbox.on_change = self._context.wake
        if outbox is not None:
            outbox.on_change = self._context.wake
        self._thread = threading.Thread(target=self._run, name=f"flexd-agent-{identity.rank}", daemon=True)

    @property
    def state(self) -> str:
        """The present activity or problem, in words."""
        return self._context.state

    @property
    def counters(self) -> dict[str, int]:
        """Since the start: connects, epochs, chunks, reports, reports dropped, errors, and messages refused by kind."""
        return dict(self._context.counters)

    def start(self) -> None:
        """Start the thread; does not wait for a daemon."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Send what is pending and end the thread; False if it did not end within the deadline.

        It is a daemon thread, so it does not keep the process alive.
        """
        self._context.stopping.set()
        self._context.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def report(self, report: StepReport) -> None:
        """Add a report, from the training thread; never waits on the network. Unsent reports are merged into one."""
        if self._context.reports.add(report):
            self._context.wake()

    @property
    def report_waiting(self) -> bool:
        """True if a report was added and not sent yet."""
        return self._context.reports.waiting

    def _run(self) -> None:
        backoff = reconnect_backoff()
        while not self._context.stopping.is_set():
            wait = 0.0
            try:
                RankConnection(self._context, backoff).run()
            except (TopologyError, AuthenticationError) as error:
                self._record_failure("refused", error)
                wait = REFUSED_RETRY_SECONDS
            except CHANNEL_ERRORS as error:
                self._record_failure("connecting", error)
            except Exception as error:
                # This thread must outlive every unexpected error, also of placement_lists.
                if first_line(error) != self._context.last_logged:
                    logger.exception("rank %d: control agent: unexpected error", self._rank)
                self._record_failure("connecting", error)
            self._context.stopping.wait(max(wait, backoff.seconds()))
        self._context.state = "stopped"

    def _record_failure(self, state: str, error: Exception) -> None:
        context, text = self._context, first_line(error)
        context.counters[_error_kind(error)] += 1
        context.state = f"{state}: {text}"
        if state == "connecting" and context.counters["connects"] and isinstance(error, CHANNEL_ERRORS):
            self._log_lost(text)
            return
        # The same failure is logged once, not at every retry.
        level = logging.DEBUG if text == context.last_logged else logging.WARNING
        context.last_logged = text
        logger.log(level, "rank %d: control channel: %s", self._rank, text)

    def _log_lost(self, text: str) -> None:
        """Log that the daemon is away: what a restart causes is no fault of this rank, and needs no advice."""
        context, now = self._context, time.monotonic()
        if context.lost_at is None:
            context.lost_at = now
            logger.info("rank %d: the daemon is away (%s); training goes on", self._rank, text)
        elif now - context.lost_at > QUIET_SECONDS and not context.warned_of_loss:
            context.warned_of_loss = True
            logger.warning(
                "rank %d: control channel: no daemon for %.0f s: %s; training goes on, with the placement that it has",
                self._rank, now - context.lost_at, text,
            )  # fmt: skip


def _error_kind(error: Exception) -> str:
    if isinstance(error, AuthenticationError):
        return "forged"
    if isinstance(error, StaleMessageError):
        return "stale"
    return "identity_refused" if isinstance(error, TopologyError) else "errors"
