"""Events of the channel that nobody has received yet: in turns by peer, within bounds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from flexd.control.daemon.channel_types import EVENT_BYTES, PEER_SHARE_BYTES, ChannelOptions, Event


class UnreadEvents:
    """Queues of events by peer. The channel's thread adds, any other thread receives.

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
        peer is below its bound and all are below theirs with it. A frame beyond that bound gets in alone."""
        with self._changed:
            own, options = self._peer_bytes.get(peer, 0), self._options
            fits = self._total + nbytes <= options.unread_bytes or not self._total
            if own + nbytes <= PEER_SHARE_BYTES or (fits and own < options.peer_unread_bytes):
                return True
            self._is_short = True
            return False

    def add(self, event: Event, nbytes: int = 0) -> None:
        """Add an event of ``nbytes``."""
        with self._changed:
            nbytes += EVENT_BYTES
            self._count(event.peer, nbytes)
            queue = self._queues.get(event.peer)
            if queue is None:
                queue = self._queues[event.peer] = deque()
                self._turns.append(event.peer)
            queue.append((event, nbytes))
            self._changed.notify()

    def receive(self, limit: int, timeout_seconds: float) -> list[Event]:
        """Return at most ``limit`` events, one of each peer in turn, each peer's in order."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self._turns and not self._woken:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
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
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _count(self, peer: int, nbytes: int) -> None:
        self._total += nbytes
        own = self._peer_bytes.get(peer, 0) + nbytes
        if own:
            self._peer_bytes[peer] = own
        else:
            self._peer_bytes.pop(peer, None)
