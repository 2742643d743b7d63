"""The daemon's end of the control channel: one listening port, one thread that serves all connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flexd.control.protocol.credentials import ChannelCredentials
from flexd.control.protocol.frames import Body


@dataclass(frozen=True)
class ChannelOptions:
    """Where the channel listens, and its bounds.

    Attributes:
        port: 0 binds a free port.
        timeout_seconds: deadline of a started large frame, and of a peer that has output and reads nothing.
        handshake_seconds: deadline of a handshake.
        max_unproven: connections in the handshake; one more closes the oldest.
        max_peers: proven connections; one more is refused.
        peer_unread_bytes: frames of one peer that nobody has received yet; beyond it the peer is not read.
        unread_bytes: the same of all peers together.
        peer_queued_bytes: frames queued for one peer; beyond it the peer is closed (shared bodies count for each).
        queued_bytes: frames queued for all peers (shared bodies count once); beyond it the slowest peers are closed.
    """

    host: str = "127.0.0.1"
    port: int = 0
    timeout_seconds: float = 15.0
    handshake_seconds: float = 5.0
    max_unproven: int = 256
    max_peers: int = 4096
    peer_unread_bytes: int = 4 * 2**20
    unread_bytes: int = 64 * 2**20
    peer_queued_bytes: int = 64 * 2**20
    queued_bytes: int = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Opened:
    """A peer has proved itself. ``peer`` is a number that is never used again."""

    peer: int
    version: int
    features: frozenset[str]
    address: str


@dataclass(frozen=True, slots=True)
class Received:
    """A frame of a peer."""

    peer: int
    message: bytes
    body: Body


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection of a peer has ended; nothing of it follows. ``reason`` is a bounded label for metrics."""

    peer: int
    reason: str


Event = Opened | Received | Closed


@dataclass(frozen=True)
class ChannelCounters:
    """The channel at one moment; sums are since the start.

    Attributes:
        open, unproven: connections now.
        accepted, proven: connections so far.
        refused: connections that ended before they had proven themselves, by reason.
        closed: proven connections that ended, by reason.
        unread_bytes, queued_bytes: what waits in memory now, to be received or sent.
    """

    open: int = 0
    unproven: int = 0
    accepted: int = 0
    proven: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    closed: Mapping[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    unread_bytes: int = 0
    queued_bytes: int = 0


class ChannelServer:
    """Accepts, proves and serves the connections of the ranks. All methods are thread-safe."""

    def __init__(self, options: ChannelOptions, credentials: ChannelCredentials) -> None:
        """Listen. Raises ControlError: the address cannot be bound."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread; connections are accepted from now on."""
        raise NotImplementedError

    def stop(self, timeout_seconds: float) -> bool:
        """Close all connections, after what is queued has been sent if that is possible within half the time, and end
        the thread; False if it did not end in time."""
        raise NotImplementedError

    def receive(self, limit: int, timeout_seconds: float) -> list[Event]:
        """Return at most ``limit`` events; waits until there is one, for the timeout, or for ``wake``.

        Peers take turns: one that floods does not delay the others by more than a frame each.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Let the running call of ``receive``, or else the next one, return at once."""
        raise NotImplementedError

    def send(self, peers: Sequence[int], message: bytes, body: Body = b"") -> None:
        """Queue a frame for ``peers`` without waiting; body and message are shared, not copied. Unknown peers are
        skipped. Raises ControlError: too long for a frame."""
        raise NotImplementedError

    def close(self, peer: int, reason: str) -> None:
        """Close the connection of a peer; it receives ``reason`` after what is queued for it."""
        raise NotImplementedError

    def counters(self) -> ChannelCounters:
        raise NotImplementedError
