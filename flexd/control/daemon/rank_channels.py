"""The daemon's connections to the ranks: which connection speaks for which registration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flexd.control.daemon.channel_events import Closed, Opened, Received
from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.daemon.membership import Topology
from flexd.control.protocol.bodies import Bytes
from flexd.control.protocol.messages import ControlMessage, DaemonNotice, Heartbeat, Hello, encode
from flexd.core.errors import StaleMessageError

__all__ = ["RankChannels", "RankDisconnected", "Received"]

HEARTBEAT_SECONDS = 1.0
"""Time between two heartbeats to a rank; longer with very many ranks, shorter with a short timeout."""
_HEARTBEATS_PER_SECOND = 1_000
"""To all ranks together."""
_HEARTBEATS_PER_TIMEOUT = 4


class RankDisconnected(NamedTuple):
    """The connection of a registration has ended."""

    hello: Hello
    reason: str


class RankChannels:
    """Sends and receives the messages of the ranks. Belongs to the coordinator's thread.

    Args:
        notice: the first message to each peer.
        timeout_seconds: shortest silence after which a rank gives the daemon up.
    """

    def __init__(self, server: ChannelServer, notice: DaemonNotice, timeout_seconds: float) -> None:
        self._server = server
        self._notice = encode(notice)
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

    def check_sender(self, peer: int, hello: Hello) -> None:
        """Raises StaleMessageError: the connection speaks for another rank, or the rank has a newer one."""
        known = self._hello_of.get(peer)
        if known is not None and (known.session, known.identity) != (hello.session, hello.identity):
            raise StaleMessageError(f"a hello of rank {hello.identity.rank} on another rank's connection")
        if self._peer_of.get(hello.session, peer) > peer:
            raise StaleMessageError(f"a hello of rank {hello.identity.rank} on a connection that it has given up")

    def register(self, peer: int, hello: Hello) -> None:
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
