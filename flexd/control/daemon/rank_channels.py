"""The daemon's connections to the ranks: which connection speaks for which registration, and what may act of what they
send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flexd.control.daemon.channel_events import Closed, Opened, Received
from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.daemon.membership import Membership, Topology
from flexd.control.protocol.messages import (
    Bytes,
    ControlMessage,
    DaemonNotice,
    EpochMessage,
    Heartbeat,
    Hello,
    HelloRefused,
    MalformedReportError,
    TableList,
    decode,
    encode,
)
from flexd.core.errors import ControlError, StaleMessageError, TopologyError, UnknownMessageError
from flexd.core.supervision import fault_point, is_power_of_two

if TYPE_CHECKING:
    from flexd.control.daemon.epoch import Epoch

__all__ = ["RankChannels", "RankDisconnected", "Received"]

REFUSED_KINDS = ("stale", "malformed", "identity", "unknown")
"""stale: of another attempt, generation, epoch or connection. malformed: no message that belongs here, or one whose
report is not in order. identity: of a rank that contradicts the daemon or its peers. unknown: of a kind that a newer
version may have; ignored."""

HEARTBEAT_SECONDS = 1.0
"""Time between two heartbeats to a rank; longer with very many ranks, shorter with a short timeout."""
_HEARTBEATS_PER_SECOND = 1_000
"""To all ranks together."""
_HEARTBEATS_PER_TIMEOUT = 4


class EpochFailedError(ControlError):
    """A message in order whose content ends the epoch."""


class RankDisconnected(NamedTuple):
    """The connection of a registration has ended."""

    hello: Hello
    reason: str


class RankChannels:
    """Sends, receives, checks and dispatches the messages of the ranks. Belongs to the coordinator's thread.

    Args:
        notice: the first message to each peer.
        timeout_seconds: shortest silence after which a rank gives the daemon up.
        members: registers the ranks whose hello is in order.
        on_event: called with (name, fields) of each log line.

    Attributes:
        refused: number of refused messages by kind, see ``REFUSED_KINDS``.
        malformed_reports: number of refused reports by the field that was not in order.
    """

    def __init__(
        self,
        server: ChannelServer,
        notice: DaemonNotice,
        timeout_seconds: float,
        members: Membership,
        on_event: Callable[..., None],
    ) -> None:
        self._server = server
        self._instance = notice.instance
        self._notice = encode(notice)
        self._members = members
        self._event = on_event
        self.refused: Counter[str] = Counter()
        self.malformed_reports: Counter[str] = Counter()
        self._heartbeat = encode(Heartbeat())
        self._longest_heartbeat_seconds = timeout_seconds / _HEARTBEATS_PER_TIMEOUT
        self._next_heartbeat_at = 0.0
        self._hello_of: dict[int, Hello] = {}
        """By peer: the newest hello that it sent and that was accepted."""
        self._peer_of: dict[str, int] = {}
        """By session: the newest connection of each process."""

    def receive(self, limit: int, timeout_seconds: float) -> list[Received | RankDisconnected]:
        """Return what has arrived, at most ``limit``; waits until there is something or the timeout."""
        found: list[Received | RankDisconnected] = []
        for event in self._server.receive(limit, timeout_seconds):
            if isinstance(event, Received):
                found.append(event)
            elif isinstance(event, Opened):
                self._server.send([event.peer], self._notice)
            elif isinstance(event, Closed):
                hello = self._hello_of.pop(event.peer, None)
                if hello is not None and self._peer_of.get(hello.session) == event.peer:
                    del self._peer_of[hello.session]
                    found.append(RankDisconnected(hello, event.reason))
        return found

    def _check_sender(self, peer: int, hello: Hello) -> None:
        """Raises StaleMessageError: the connection speaks for another rank, or the rank has a newer one."""
        known = self._hello_of.get(peer)
        if known is not None and (known.session, known.identity) != (hello.session, hello.identity):
            raise StaleMessageError(f"a hello of rank {hello.identity.rank} on another rank's connection")
        if self._peer_of.get(hello.session, peer) > peer:
            raise StaleMessageError(f"a hello of rank {hello.identity.rank} on a connection that it has given up")

    def _register(self, peer: int, hello: Hello) -> None:
        """Record an accepted hello of a peer; an older connection of the same process is closed."""
        before = self._peer_of.get(hello.session)
        if before is not None and before != peer:
            self._hello_of.pop(before, None)
            self._server.close(before, "replaced")
        self._hello_of[peer] = hello
        self._peer_of[hello.session] = peer

    def peers_of(self, topology: Topology) -> tuple[int, ...]:
        """Return the peer of each rank; -1 for one that has left."""
        return tuple(self._peer_of.get(hello.session, -1) for hello in topology.hellos)

    def send(self, peers: Sequence[int], message: ControlMessage, body: Bytes = b"") -> None:
        """Queue a message; never waits."""
        self._server.send(peers, encode(message), body)

    def close(self, hello: Hello, reason: str) -> None:
        """Close the connection of a registration, if it has one."""
        peer = self._peer_of.get(hello.session)
        if peer is not None:
            self._server.close(peer, reason)

    def send_heartbeats(self, now: float) -> None:
        """Send a heartbeat to all registered ranks when it is due."""
        if now < self._next_heartbeat_at:
            return
        wait = max(HEARTBEAT_SECONDS, len(self._hello_of) / _HEARTBEATS_PER_SECOND)
        self._next_heartbeat_at = now + min(wait, self._longest_heartbeat_seconds)
        self._server.send(list(self._hello_of), self._heartbeat)

    def dispatch(
        self,
        received: Received,
        now: float,
        epoch: Epoch | None = None,
        act: Callable[[Epoch, int, EpochMessage, Bytes], None] | None = None,
    ) -> None:
        """Check one message and pass those of the epoch to ``act``, with their rank. A bad one is only counted, and of
        one with a bad report the rest acts.

        Raises:
            EpochFailedError: the message is in order, but ends the epoch.
        """
        malformed: MalformedReportError | None = None
        try:
            try:
                message = decode(received.message)
            except MalformedReportError as error:
                message, malformed = error.rest, error
            if isinstance(message, Hello):
                self._receive_hello(received.peer, message, now)
            elif isinstance(message, TableList):
                self._members.tables.record_tables(message, received.body)
            elif isinstance(message, EpochMessage):
                if epoch is None or act is None:
                    raise StaleMessageError(f"a {message.kind} message outside of any epoch")
                rank = epoch.rank_of(message, received.peer)
                if malformed is not None:
                    self._refuse_report(rank, malformed)
                # A message that ``act`` refuses is no sign of life.
                act(epoch, rank, message, received.body)
                self._members.mark_heard(message.fence.attempt, rank, now)
            else:
                raise ControlError(f"a {message.kind} message from a rank")
        except EpochFailedError:
            raise
        except StaleMessageError:
            self._refuse("stale")
        except UnknownMessageError:
            self._refuse("unknown")
        except ControlError:
            self._refuse("malformed")

    def _receive_hello(self, peer: int, hello: Hello, now: float) -> None:
        if hello.instance != self._instance:
            raise StaleMessageError("a hello to another daemon")
        attempt, rank = hello.identity.attempt, hello.identity.rank
        self._check_sender(peer, hello)
        try:
            if self._members.accept(hello, now):
                fault_point("hello.accepted")
                self._event("rank_hello", attempt=attempt, rank=rank, version=hello.agreed.version)
        except TopologyError as error:
            self._refuse("identity")
            if not self._members.refusal_is_known:  # It registers again every two seconds.
                self._event("rank_refused", attempt=attempt, rank=rank, reason=str(error))
            self.send([peer], HelloRefused(hello.nonce, error.message[:2000], error.remedy))
        else:
            self._register(peer, hello)

    def _refuse(self, kind: str) -> None:
        self.refused[kind] += 1
        # Anyone who can connect can send invalid messages.
        if is_power_of_two(self.refused[kind]):
            self._event("message_refused", kind=kind, count=self.refused[kind])

    def _refuse_report(self, rank: int, error: MalformedReportError) -> None:
        self.refused["malformed"] += 1
        self.malformed_reports[error.field] += 1
        if is_power_of_two(self.malformed_reports[error.field]):
            self._event(
                "report_refused", rank=rank, field=error.field, reason=error.message,
                count=self.malformed_reports[error.field],
            )  # fmt: skip
