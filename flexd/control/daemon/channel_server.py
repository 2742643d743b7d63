"""The daemon's end of the control channel: one listening port, one thread that serves all connections.

The thread accepts, proves, reads, writes and closes, and never waits for one of them.
"""

import contextlib
import errno
import logging
import resource
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence

from flexd.control.daemon.channel_events import ChannelCounters, ChannelOptions, ChannelQueues, Closed, Opened, Send
from flexd.control.daemon.channel_peer import ChannelPeer, OutputTotal, UnprovenConnection
from flexd.control.protocol.handshake import (
    OWN,
    ChannelCredentials,
    HandshakeRefusedError,
    HandshakeStatus,
    Session,
    TlsContext,
    listen,
    server_steps,
)
from flexd.control.protocol.wire import FrameError, FrameKind, SealedPayload
from flexd.core.errors import AuthenticationError
from flexd.core.secrets import accepted_keys
from flexd.core.supervision import Supervisor, fault_point

# Steps of handshakes between two looks at the proven connections: they wait for at most as many.
_HANDSHAKES, _TLS_HANDSHAKES = 64, 8
_TICK_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
# Time between two checks of the peers' deadlines and keys.
_CHECK_SECONDS = 1.0
# A peer that is closed with a reason gets as long to read it.
_CLOSE_SECONDS = 2.0

# Descriptors of the rest of the process.
_OTHER_DESCRIPTORS = 512

Connection = UnprovenConnection | ChannelPeer

logger = logging.getLogger(__name__)


class ChannelServer(ChannelQueues):
    """Accepts, proves and serves the connections of the ranks. All public methods are thread-safe; the others belong to
    the channel's thread.

    Raises:
        ControlError: the address cannot be bound.
        ConfigError: a certificate file cannot be read.
    """

    def __init__(
        self, options: ChannelOptions, credentials: ChannelCredentials, supervisor: Supervisor | None = None
    ) -> None:
        super().__init__(options)
        self._secret = credentials.secret
        self._tls = None if credentials.tls is None else TlsContext(credentials.tls, server_side=True)
        self._listener = listen(options.host, options.port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        supervisor = supervisor or Supervisor()
        self._stopping = threading.Event()
        self._watch = supervisor.watch("flexd-control-channel")
        self._thread = supervisor.thread(self._watch.thread, self._run, self._stopping)
        self._selector = selectors.DefaultSelector()
        self._interest: dict[Connection, int] = {}
        self._unproven: dict[UnprovenConnection, None] = {}
        self._peers: dict[int, ChannelPeer] = {}
        self._paused: dict[ChannelPeer, None] = {}
        self._closing: dict[ChannelPeer, float] = {}
        self._total = OutputTotal()
        self._next_number = 1
        self._accepts = True
        self._checked_at = 0.0
        self._stop_seconds = 0.0
        self._stop_at: float | None = None
        self._refused: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    def start(self) -> None:
        """Start the thread; connections are accepted from now on."""
        _raise_descriptor_limit(self._options.max_unproven + self._options.max_peers + _OTHER_DESCRIPTORS)
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Close all connections, after their queued frames if they are read within half the time, and end the thread.

        Returns:
            False if it did not end in time.
        """
        self._stop_seconds = timeout_seconds / 2
        self._stopping.set()
        if not self._thread.started:
            self._close_sockets()
            return True
        self._wake_thread()
        return self._thread.join(timeout_seconds)

    def counters(self) -> ChannelCounters:
        return ChannelCounters(
            peers=len(self._peers), unproven=len(self._unproven), proven=self._sums["proven"],
            refused=dict(self._refused), closed=dict(self._closed), bytes_in=self._sums["bytes_in"],
            unread_bytes=self.unread.nbytes, queued_bytes=self._total.nbytes,
        )  # fmt: skip

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        try:
            while self._stop_at is None or (self._closing and time.monotonic() < self._stop_at):
                try:
                    fault_point("thread.channel")
                    self._turn()
                except Exception as error:
                    # One fault may not end the channel of all ranks, nor make all of them wait for long.
                    self._watch.fault(error)
                    time.sleep(min(self._watch.seconds_to_retry, _LONGEST_PAUSE_SECONDS))
                else:
                    self._watch.progress()
        finally:
            for conn in list(self._unproven):
                self._refuse(conn, HandshakeRefusedError("stopping", reason="stopping"))
            for peer in list(self._peers.values()):
                self._close(peer, peer.close_reason or "stopping")
            self._close_sockets()

    def _close_sockets(self) -> None:
        for each in (self._listener, self._wake_reader, self._wake_writer, self._selector):
            each.close()

    def _send(self, numbers: Sequence[int], payload: SealedPayload) -> None:
        """Queue a frame for those of ``numbers`` that are connected, and send what their sockets accept now."""
        for number in numbers:
            peer = self._peers.get(number)
            if peer is None or peer.close_reason or peer.write_closed:
                continue
            peer.output.add(payload)
            self._flush(peer)
        while self._total.nbytes > self._options.queued_bytes:
            waiting = [peer for peer in self._peers.values() if peer.output]
            if not waiting:
                break
            self._close(min(waiting, key=lambda peer: peer.output.progress_at), "slow_reader")

    def _close_peer(self, number: int, reason: str) -> None:
        """Close a peer once it has what is queued, and the reason."""
        peer = self._peers.get(number)
        if peer is None or peer.close_reason:
            return
        peer.output.add(SealedPayload(reason.encode()[:200], kind=FrameKind.CLOSE))
        peer.close_reason = reason
        self._closing[peer] = time.monotonic() + _CLOSE_SECONDS
        self._flush(peer)

    def _resume(self) -> None:
        """Read the paused peers again: there is room for what they send."""
        for peer in list(self._paused):
            self._read(peer)

    def _turn(self) -> None:
        busy = self._unproven or self._closing or not self._accepts
        ready = self._selector.select(_TICK_SECONDS if busy else _CHECK_SECONDS)
        handshakes: list[UnprovenConnection] = []
        accepts = False
        for key, events in ready:
            if isinstance(key.data, ChannelPeer):
                if key.data.number in self._peers and events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if key.data.number in self._peers and events & selectors.EVENT_READ:
                    self._read(key.data)
            elif isinstance(key.data, UnprovenConnection):
                handshakes.append(key.data)
            elif key.fileobj is self._listener:
                accepts = True
        for command in self._take_commands():
            if isinstance(command, Send):
                self._send(command.peers, command.payload)
            else:
                self._close_peer(command.peer, command.reason)
        if self._has_room:
            self._has_room = False
            self._resume()
        if self._stopping.is_set() and self._stop_at is None:
            self._stop_at = time.monotonic() + self._stop_seconds
            for peer in list(self._peers.values()):
                self._close_peer(peer.number, "stopping")
        for conn in handshakes[: _HANDSHAKES if self._tls is None else _TLS_HANDSHAKES]:
            self._advance(conn)
        if accepts:
            self._accept()
        self._check_deadlines()

    def _accept(self) -> None:
        for _ in range(_HANDSHAKES if self._tls is None else _TLS_HANDSHAKES):
            if len(self._unproven) >= self._options.max_unproven:
                oldest = next(iter(self._unproven))
                if time.monotonic() - oldest.opened_at < self._options.handshake_grace_seconds:
                    self._listen(False)
                    return
                self._refuse(oldest, HandshakeRefusedError("too many connections", reason="too_many"))
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if self._unproven:
                        oldest = next(iter(self._unproven))
                        self._refuse(oldest, HandshakeRefusedError("no descriptors", reason="descriptors"))
                    self._listen(False)
                return
            self._begin(sock, str(address[0]))

    def _begin(self, sock: socket.socket, address: str) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                context = self._tls.current()
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError):
            # It has been closed in the meantime.
            sock.close()
            self._refused["disconnected"] += 1
            return
        conn = UnprovenConnection(sock, address, server_steps(OWN, accepted_keys(self._secret)))
        self._unproven[conn] = None
        self._set_interest(conn, selectors.EVENT_READ)

    def _advance(self, conn: UnprovenConnection) -> None:
        if conn not in self._unproven:
            return
        try:
            session = conn.advance()
            if session is None:
                self._set_interest(conn, selectors.EVENT_WRITE if conn.wants_write else selectors.EVENT_READ)
                return
            if max(len(self._peers), self.unread.peers) >= self._options.max_peers:
                raise HandshakeRefusedError(
                    "too many trainers", reason="too_many_peers", reply=session.verdict(HandshakeStatus.TOO_MANY)
                )
            conn.send(session.verdict(HandshakeStatus.OK))
        except HandshakeRefusedError as error:
            self._refuse(conn, error)
        else:
            self._open(conn, session)

    def _open(self, conn: UnprovenConnection, session: Session) -> None:
        del self._unproven[conn]
        self._set_interest(conn, 0)
        peer = ChannelPeer(conn.sock, self._next_number, session, self.unread, self._total)
        self._next_number += 1
        self._peers[peer.number] = peer
        self._sums.update(proven=1, bytes_in=conn.bytes_in)
        self.unread.add(Opened(peer.number))
        self._update(peer)

    def _refuse(self, conn: UnprovenConnection, error: HandshakeRefusedError) -> None:
        del self._unproven[conn]
        self._set_interest(conn, 0)
        self._refused[error.reason] += 1
        self._sums["bytes_in"] += conn.bytes_in
        with contextlib.suppress(OSError):
            if error.reply:
                conn.sock.send(error.reply)
        conn.sock.close()
        logger.debug("control channel: %s is refused: %s", conn.address, error.message)

    def _read(self, peer: ChannelPeer) -> None:
        before = peer.bytes_in
        try:
            peer.read()
        except FrameError as error:
            self._close(peer, peer.close_reason or error.reason)
        except AuthenticationError:
            self._close(peer, "forged")
        else:
            self._flush(peer)
        self._sums["bytes_in"] += peer.bytes_in - before
        while self.unread.partial_bytes > self._options.partial_bytes:
            self._close(max(self._peers.values(), key=lambda each: each.partial_bytes), "flood")

    def _flush(self, peer: ChannelPeer) -> None:
        try:
            peer.output.flush(peer.sock)
        except OSError:
            # The frames that it sent before are still to be read; then reading fails too.
            peer.write_closed = True
            peer.output.clear()
        if peer.close_reason and not peer.output:
            self._close(peer, peer.close_reason)
            return
        if peer.output.nbytes > self._options.peer_queued_bytes:
            self._close(peer, "slow_reader")
            return
        self._update(peer)

    def _update(self, peer: ChannelPeer) -> None:
        if peer.is_paused:
            self._paused.setdefault(peer)
        else:
            self._paused.pop(peer, None)
        reads = 0 if peer.is_paused else selectors.EVENT_READ
        self._set_interest(peer, reads | (selectors.EVENT_WRITE if peer.output else 0))

    def _close(self, peer: ChannelPeer, reason: str) -> None:
        if self._peers.get(peer.number) is not peer:
            return
        del self._peers[peer.number]
        self._closed[reason] += 1
        self._paused.pop(peer, None)
        self._closing.pop(peer, None)
        self._set_interest(peer, 0)
        peer.sock.close()
        peer.release()
        self.unread.add(Closed(peer.number, reason))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        while self._unproven:
            oldest = next(iter(self._unproven))
            if now - oldest.opened_at < self._options.handshake_seconds:
                break
            self._refuse(oldest, HandshakeRefusedError("no handshake in time", reason="timeout"))
        if not self._accepts:
            self._listen(True)
        for peer in [peer for peer, until in self._closing.items() if now > until]:
            self._close(peer, peer.close_reason)
        if now - self._checked_at >= _CHECK_SECONDS:
            self._checked_at = now
            self._check_peers(now)

    def _check_peers(self, now: float) -> None:
        # Room may also come from a peer that has been closed.
        self._resume()
        keys = accepted_keys(self._secret)
        for peer in list(self._peers.values()):
            if peer.output and now - peer.output.progress_at > self._options.timeout_seconds:
                self._close(peer, "stalled")
            elif peer.is_late(now, self._options.timeout_seconds):
                self._close(peer, "slow_frame")
            elif peer.proven_key not in keys:
                self._close_peer(peer.number, "key_removed")

    def _listen(self, accepts: bool) -> None:
        if accepts != self._accepts:
            self._accepts = accepts
            if accepts:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)

    def _set_interest(self, conn: Connection, events: int) -> None:
        before = self._interest.pop(conn, 0)
        if events:
            self._interest[conn] = events
        if events and before:
            self._selector.modify(conn.sock, events, conn)
        elif events:
            self._selector.register(conn.sock, events, conn)
        elif before:
            self._selector.unregister(conn.sock)


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
