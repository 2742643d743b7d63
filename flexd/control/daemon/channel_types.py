"""Options, events and counters of the daemon's end of the control channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexd.control.protocol.frames import MAX_FRAME_BYTES, READ_BYTES, Body
from flexd.control.protocol.handshake import MAX_CLIENT_BYTES

PEER_SHARE_BYTES = 2**14
"""Unread bytes that each peer may have whatever the others do, so that nobody's flood stops another one's messages."""
EVENT_BYTES = 512
"""Memory of an unread event or a queued frame beside its bytes; each counts for as much."""
CONNECTION_BYTES = 2**13
"""Memory of a connection beside its buffers."""
TLS_BYTES = 2**17
"""Memory of OpenSSL for a connection."""


@dataclass(frozen=True)
class ChannelOptions:
    """Where the channel listens, and its bounds.

    Attributes:
        port: 0 binds a free port.
        timeout_seconds: deadline of a frame that has begun, and of a peer that has output and reads nothing.
        handshake_seconds: deadline of a handshake.
        handshake_grace_seconds: while all places are used by connections younger than this, new ones wait unaccepted.
        max_unproven: connections in the handshake; one more closes the oldest.
        max_peers: proven connections; one more is refused.
        peer_unread_bytes: frames of one peer that nobody has received yet; beyond it the peer is not read.
        unread_bytes: the same of all peers together, beside the ``PEER_SHARE_BYTES`` of each.
        partial_bytes: received from all peers together of frames that are not whole yet, or wait for room; beyond it
            the peer with most is closed.
        peer_queued_bytes: frames queued for one peer; beyond it the peer is closed (shared bodies count for each).
        queued_bytes: frames queued for all peers (shared bodies count once); beyond it the slowest peers are closed.
    """

    host: str = "127.0.0.1"
    port: int = 0
    timeout_seconds: float = 15.0
    handshake_seconds: float = 5.0
    handshake_grace_seconds: float = 0.5
    max_unproven: int = 1024
    max_peers: int = 4096
    peer_unread_bytes: int = 4 * 2**20
    unread_bytes: int = 64 * 2**20
    partial_bytes: int = 96 * 2**20
    peer_queued_bytes: int = 64 * 2**20
    queued_bytes: int = 256 * 2**20

    def memory_bound_bytes(self, with_tls: bool = False) -> int:
        """Return the most memory that the connections may use, whatever their other ends send."""
        connection = CONNECTION_BYTES + (TLS_BYTES if with_tls else 0)
        peer = connection + PEER_SHARE_BYTES
        # One frame may be added to each total before its bound takes effect.
        totals = self.unread_bytes + self.partial_bytes + self.queued_bytes + 2 * MAX_FRAME_BYTES + READ_BYTES
        return self.max_unproven * (connection + MAX_CLIENT_BYTES) + self.max_peers * peer + totals


@dataclass(frozen=True, slots=True)
class Opened:
    """A peer has proved itself. ``peer`` is a number that is never used again."""

    peer: int
    version: int
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

REFUSED_REASONS = (
    "garbage", "malformed", "oversized", "version", "wrong_secret", "tls", "timeout", "disconnected", "too_many",
    "too_many_peers", "descriptors", "stopping",
)  # fmt: skip
"""Reasons why a connection ended before it had proven itself."""


@dataclass(frozen=True)
class ChannelCounters:
    """The channel at one moment; sums are since the start.

    Attributes:
        peers, unproven: connections now, proven and not.
        accepted, proven: connections so far.
        refused: connections that ended before they had proven themselves, by reason.
        closed: proven connections that ended, by reason.
        unread_bytes, queued_bytes: bytes in memory now that wait to be received or sent.
    """

    peers: int = 0
    unproven: int = 0
    accepted: int = 0
    proven: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    closed: Mapping[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    unread_bytes: int = 0
    queued_bytes: int = 0
