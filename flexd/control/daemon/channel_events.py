"""Options, events and counters of the daemon's end of the control channel, and the queues to and from its thread."""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flexd.control.protocol.wire import Body, SealedPayload

PEER_SHARE_BYTES = 2**14
"""Unread bytes that each peer may have whatever the others do, so that nobody's flood stops another one's messages."""
EVENT_BYTES = 512
"""Memory of an unread event or a queued frame beside its bytes; each counts for as much."""
# Frames between ``send`` and the channel's thread; with more, ``send`` waits.
_UNSENT_BYTES = 2**26


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


@dataclass(frozen=True, slots=True)
class Opened:
    """A peer has proved itself. ``peer`` is a number that is never used again."""

    peer: int


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
        proven: connections so far.
        refused: connections that ended before they had proven themselves, by reason.
        closed: proven connections that ended, by reason.
        unread_bytes, queued_bytes: bytes in memory now that wait to be received or sent.
    """

    peers: int = 0
    unproven: int = 0
    proven: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    closed: Mapping[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    unread_bytes: int = 0
    queued_bytes: int = 0


class UnreadEvents:
    """Queues of events by peer, received in turns. The channel's thread adds, any other thread receives.

    Args:
        on_room: called after a receive that follows a refused ``has_room``, from the receiving thread.
    """

    def __init__(self, options: ChannelOptions, on_room: Callable[[], None]) -> None:
        self._options = options
        self._on_room = on_room
        self._changed = threading.Condition()
        self._queues: dict[int, deque[tuple[Event, int]]] = {}
        self._turns: deque[int] = deque()
        self._peer_bytes: dict[int, int] = {}
        self._total = 0
        # Bytes beyond the share of each peer.
        self._shared = 0
        # Bytes of the frames that wait for room, by peer, in the order in which they get it.
        self._waiting: dict[int, int] = {}
        self.partial_bytes = 0
        """Received bytes that are no whole frame yet, or wait for room. Changed by the channel's thread."""
        self._is_short = False
        self._woken = False

    @property
    def peers(self) -> int:
        """Number of peers with unread events."""
        return len(self._queues)

    @property
    def nbytes(self) -> int:
        return self._total

    def has_room(self, peer: int, nbytes: int) -> bool:
        """Return whether a frame of ``nbytes`` of ``peer`` may be added: it is within the peer's own share, or the
        peer is below its bound and all are below theirs with it and with the frames that have waited longer: small
        ones do not take the room that a large one waits for. A frame beyond that bound gets in alone."""
        with self._changed:
            own, limit = self._peer_bytes.get(peer, 0), self._options.unread_bytes
            if own + nbytes <= PEER_SHARE_BYTES:
                return True
            if own < self._options.peer_unread_bytes:
                taken = self._shared
                for other, waiting in self._waiting.items():
                    if other == peer or taken > limit:
                        break
                    taken += waiting
                if taken + nbytes <= limit or not taken:
                    return True
                self._waiting[peer] = nbytes
            self._is_short = True
            return False

    def add(self, event: Event, nbytes: int = 0) -> None:
        """Add an event of ``nbytes``."""
        with self._changed:
            nbytes += EVENT_BYTES
            self._waiting.pop(event.peer, None)
            self._count(event.peer, nbytes)
            queue = self._queues.get(event.peer)
            if queue is None:
                queue = self._queues[event.peer] = deque()
                self._turns.append(event.peer)
            queue.append((event, nbytes))
            self._changed.notify()

    def receive(self, limit: int, timeout_seconds: float) -> list[Event]:
        """Return at most ``limit`` events; waits until there is one, for the timeout, or for ``wake``.

        Peers take turns, and each one's events are in order: a peer that floods delays each of the others by one frame.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._turns or self._woken, timeout_seconds)
            self._woken = False
            events: list[Event] = []
            while self._turns and len(events) < limit:
                peer = self._turns.popleft()
                queue = self._queues[peer]
                event, nbytes = queue.popleft()
                events.append(event)
                self._count(peer, -nbytes)
                if queue:
                    self._turns.append(peer)
                else:
                    del self._queues[peer]
            had_short, self._is_short = self._is_short and bool(events), self._is_short and not events
        if had_short:
            self._on_room()
        return events

    def wake(self) -> None:
        """Let the running call of ``receive``, or else the next one, return at once."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _count(self, peer: int, nbytes: int) -> None:
        before = self._peer_bytes.get(peer, 0)
        own = before + nbytes
        self._total += nbytes
        self._shared += max(0, own - PEER_SHARE_BYTES) - max(0, before - PEER_SHARE_BYTES)
        if own:
            self._peer_bytes[peer] = own
        else:
            self._peer_bytes.pop(peer, None)


@dataclass(frozen=True, slots=True)
class Send:
    """A frame to send to peers."""

    peers: tuple[int, ...]
    payload: SealedPayload


class ChannelQueues:
    """The queues between the channel's thread and others, whose the public methods are.

    Attributes:
        unread: what the peers have sent.
    """

    def __init__(self, options: ChannelOptions) -> None:
        self._options = options
        self.unread = UnreadEvents(options, self._note_room)
        # Set when events were received after a peer had found no room.
        self._has_room = False
        self._unsent = threading.Condition()
        self._unsent_bytes = 0
        # In order; ``Closed`` is to be closed.
        self._commands: deque[Send | Closed] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def send(self, peers: Sequence[int], message: bytes, body: Body = b"") -> None:
        """Queue a frame for ``peers``; message and body are shared, not copied. Closed and unknown peers are skipped.

        Raises:
            ControlError: too long for a frame.
        """
        payload = SealedPayload(message, body)
        with self._unsent:
            # The channel's thread never waits for a peer, so this ends soon; without it nothing bounds a fast sender.
            self._unsent.wait_for(lambda: self._unsent_bytes <= _UNSENT_BYTES, self._options.timeout_seconds)
            self._unsent_bytes += payload.nbytes
        self._commands.append(Send(tuple(peers), payload))
        self._wake_thread()

    def close(self, peer: int, reason: str) -> None:
        """Close the connection of a peer; it receives ``reason`` after the frames that are queued for it."""
        self._commands.append(Closed(peer, reason))
        self._wake_thread()

    def _note_room(self) -> None:
        self._has_room = True
        self._wake_thread()

    def _wake_thread(self) -> None:
        # An error means: full of wakes that have not been seen yet, or stopped.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def _take_commands(self) -> Iterator[Send | Closed]:
        """Yield what other threads want done. A wake that comes meanwhile is seen in the next turn."""
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Send):
                with self._unsent:
                    self._unsent_bytes -= command.payload.nbytes
                    self._unsent.notify()
            yield command
