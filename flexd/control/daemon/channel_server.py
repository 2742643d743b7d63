"""The daemon's end of the control channel: one listening port, one thread that serves all connections."""

from __future__ import annotations

import logging
import resource
import socket
import threading
from collections.abc import Sequence

from flexd.control.daemon.channel_loop import ChannelLoop
from flexd.control.daemon.channel_types import ChannelCounters, ChannelOptions, Event
from flexd.control.daemon.unread_events import UnreadEvents
from flexd.control.protocol.credentials import ChannelCredentials, TlsContext
from flexd.control.protocol.frames import Body, SealedPayload
from flexd.control.protocol.network import listen
from flexd.core.supervision import Supervisor

_BACKLOG = 4096
_OTHER_DESCRIPTORS = 512
"""Descriptors of the rest of the process."""
_UNSENT_BYTES = 2**26
"""Frames between ``send`` and the channel's thread; with more, ``send`` waits."""

logger = logging.getLogger(__name__)


class ChannelServer:
    """Accepts, proves and serves the connections of the ranks. All methods are thread-safe.

    Raises:
        ControlError: the address cannot be bound.
        ConfigError: a certificate file cannot be read.
    """

    def __init__(
        self, options: ChannelOptions, credentials: ChannelCredentials, supervisor: Supervisor | None = None
    ) -> None:
        self._options = options
        tls = None if credentials.tls is None else TlsContext(credentials.tls, server_side=True)
        descriptor, self.port = listen(options.host, options.port)
        listener = socket.socket(fileno=descriptor)
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._listener = listener
        self._unread = UnreadEvents(options, lambda: self._loop.post(self._loop.resume))
        supervisor = supervisor or Supervisor()
        self._stopping = threading.Event()
        watch = supervisor.watch("flexd-control-channel")
        self._loop = ChannelLoop(options, credentials, listener, tls, self._unread, watch)
        self._thread = supervisor.thread(watch.thread, self._loop.run, self._stopping)
        self._unsent = threading.Condition()
        self._unsent_bytes = 0

    def start(self) -> None:
        """Start the thread; connections are accepted from now on."""
        _raise_descriptor_limit(self._options.max_unproven + self._options.max_peers + _OTHER_DESCRIPTORS)
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Close all connections, after their queued frames if they are read within half the time, and end the thread.

        Returns:
            False if it did not end in time.
        """
        self._stopping.set()
        if not self._thread.started:
            self._listener.close()
            return True
        self._loop.post(lambda: self._loop.stop(timeout_seconds / 2))
        return self._thread.join(timeout_seconds)

    def receive(self, limit: int, timeout_seconds: float) -> list[Event]:
        """Return at most ``limit`` events; waits until there is one, for the timeout, or for ``wake``.

        Peers take turns: a peer that floods delays each of the others by one frame.
        """
        return self._unread.receive(limit, timeout_seconds)

    def wake(self) -> None:
        """Let the running call of ``receive``, or else the next one, return at once."""
        self._unread.wake()

    def send(self, peers: Sequence[int], message: bytes, body: Body = b"") -> None:
        """Queue a frame for ``peers``; message and body are shared, not copied. Closed and unknown peers are skipped.

        Raises:
            ControlError: too long for a frame.
        """
        payload = SealedPayload(message, body)
        numbers = tuple(peers)
        with self._unsent:
            # The channel's thread never waits for a peer, so this ends soon; without it nothing bounds a fast sender.
            self._unsent.wait_for(lambda: self._unsent_bytes <= _UNSENT_BYTES, self._options.timeout_seconds)
            self._unsent_bytes += payload.nbytes
        self._loop.post(lambda: self._send(numbers, payload))

    def close(self, peer: int, reason: str) -> None:
        """Close the connection of a peer; it receives ``reason`` after the frames that are queued for it."""
        self._loop.post(lambda: self._loop.close_peer(peer, reason))

    def counters(self) -> ChannelCounters:
        return self._loop.counters()

    def _send(self, peers: Sequence[int], payload: SealedPayload) -> None:
        try:
            self._loop.send(peers, payload)
        finally:
            with self._unsent:
                self._unsent_bytes -= payload.nbytes
                self._unsent.notify()


def _raise_descriptor_limit(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
        soft = enough
    if soft != resource.RLIM_INFINITY and soft < needed:
        logger.warning(
            "the control channel may need %d descriptors, the process may have %d: raise the limit of open files",
            needed, soft,
        )  # fmt: skip
