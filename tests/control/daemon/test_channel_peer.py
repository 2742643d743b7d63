"""Peers and connections that prove nothing: what misbehaves is bounded or closed, counted, and the others go on."""

import contextlib
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.daemon.channel_events import EVENT_BYTES, REFUSED_REASONS, ChannelOptions, Closed
from flexd.control.daemon.channel_peer import OutputTotal, PeerOutput
from flexd.control.protocol.handshake import (
    MAGIC,
    MAX_CLIENT_BYTES,
    MAX_FIELDS_BYTES,
    NONCE_BYTES,
    OWN,
    PROOF_BYTES,
    ChannelCredentials,
    Versions,
    encode_hello,
)
from flexd.control.protocol.wire import (
    HEAD,
    MAX_BODY_BYTES,
    MAX_MESSAGE_BYTES,
    FrameKey,
    SealedPayload,
)
from flexd.core.errors import ControlError
from flexd.core.secrets import KeyFile
from tests.support.channel import (
    CREDENTIALS,
    DEADLINE_SECONDS,
    EchoDaemon,
    RawPeer,
    echo_daemon,
    fill,
    honest_peer,
    is_closed,
    raw_connection,
    round_trip,
)
from tests.support.until import until

HELLO = encode_hello(OWN, bytes(NONCE_BYTES))
GLOO_PREAMBLE = (2).to_bytes(8, "little") + bytes(64)


def refused(daemon: EchoDaemon, reason: str) -> int:
    assert reason in REFUSED_REASONS
    return daemon.server.counters().refused.get(reason, 0)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: flexd\r\n\r\n", "garbage"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "garbage"),
        (GLOO_PREAMBLE, "garbage"),
        (bytes(2**20), "garbage"),
        (MAGIC + b"\0" + (MAX_FIELDS_BYTES + 1).to_bytes(2, "big"), "oversized"),
        (MAGIC + b"\xff\0\x2c" + bytes(44), "malformed"),
        (MAGIC + b"\0\0\x01x", "malformed"),
        (MAGIC + b"\0\0\x2c" + bytes(44), "malformed"),
        (encode_hello(Versions(900, 901), bytes(NONCE_BYTES)), "version"),
        (HELLO + bytes(PROOF_BYTES), "wrong_secret"),
    ],
    ids=["http", "tls", "gloo", "zeros", "long", "status", "short", "versions", "other_version", "zero_proof"],
)
def test_garbage_is_refused_and_counted(sent: bytes, reason: str) -> None:
    with echo_daemon() as daemon, honest_peer(daemon):
        sock = raw_connection(daemon.server.port)
        # The daemon may have closed the connection before all is sent.
        with contextlib.suppress(OSError):
            sock.sendall(sent)
        assert is_closed(sock)
        until(lambda: refused(daemon, reason) == 1, DEADLINE_SECONDS, lambda: daemon.server.counters())
        assert daemon.server.counters().proven <= 2


@pytest.mark.parametrize(
    "sent",
    [b"", MAGIC[:3], HELLO[:20], HELLO, HELLO + bytes(PROOF_BYTES - 1)],
    ids=["nothing", "magic", "hello", "no_proof", "half_proof"],
)
def test_half_a_handshake_is_closed_at_its_deadline(sent: bytes) -> None:
    with echo_daemon(ChannelOptions(handshake_seconds=0.3)) as daemon, honest_peer(daemon):
        sock = raw_connection(daemon.server.port)
        sock.sendall(sent)
        assert is_closed(sock)
        assert refused(daemon, "timeout") == 1


def test_a_recorded_handshake_is_refused() -> None:
    with echo_daemon() as daemon, honest_peer(daemon):
        honest = RawPeer(daemon.server.port)
        sock = raw_connection(daemon.server.port)
        sock.sendall(b"".join(honest.sent) + honest.frame(b"recorded"))
        assert is_closed(sock)
        until(lambda: refused(daemon, "wrong_secret") == 1, DEADLINE_SECONDS, lambda: daemon.server.counters())


def test_the_daemons_own_proof_is_refused() -> None:
    with echo_daemon() as daemon, honest_peer(daemon):
        sock = raw_connection(daemon.server.port)
        sock.sendall(HELLO)
        answer = b""
        while len(answer) < len(HELLO) + 2 * PROOF_BYTES:
            answer += sock.recv(4096)
        sock.sendall(answer[len(HELLO) :][:PROOF_BYTES])
        assert is_closed(sock)
        until(lambda: refused(daemon, "wrong_secret") == 1, DEADLINE_SECONDS, lambda: daemon.server.counters())


@pytest.mark.parametrize("start", [b"GET", MAGIC, HELLO], ids=["garbage", "hello", "proof"])
def test_nothing_beyond_the_handshake_is_read(start: bytes) -> None:
    with echo_daemon() as daemon:
        sock = raw_connection(daemon.server.port)
        # The daemon closes the connection before all is sent.
        with contextlib.suppress(OSError):
            sock.sendall(start + bytes(2**24))
        assert is_closed(sock)
        assert 0 < daemon.server.counters().bytes_in <= MAX_CLIENT_BYTES


def test_a_new_rank_is_let_in_while_all_places_are_taken() -> None:
    options = ChannelOptions(max_unproven=8, handshake_seconds=60.0, handshake_grace_seconds=0.1)
    with echo_daemon(options) as daemon, honest_peer(daemon):
        sockets = [raw_connection(daemon.server.port) for _ in range(8)]
        until(lambda: daemon.server.counters().unproven == 8, DEADLINE_SECONDS)
        # The end of ``honest_peer`` connects once more.
    assert sum(is_closed(sock) for sock in sockets) == 8
    assert refused(daemon, "too_many") >= 1


def closed(daemon: EchoDaemon, reason: str) -> int:
    return daemon.server.counters().closed.get(reason, 0)


def expect_closed(daemon: EchoDaemon, peer: RawPeer, reason: str) -> None:
    assert is_closed(peer.sock)
    until(lambda: closed(daemon, reason) == 1, DEADLINE_SECONDS, lambda: daemon.server.counters())
    until(lambda: [event.reason for event in daemon.closed()] == [reason], DEADLINE_SECONDS, daemon.closed)


def flipped(frame: bytes, at: int, bits: int = 1) -> bytes:
    return frame[:at] + bytes([frame[at] ^ bits]) + frame[at:][1:]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        *((lambda _, head=head: HEAD.pack(*head), "oversized") for head in (
            (MAX_BODY_BYTES + 1, 0, 0), (MAX_MESSAGE_BYTES + 1, 0, MAX_MESSAGE_BYTES + 1), (2**32 - 1, 0, 0),
        )),
        (lambda _: HEAD.pack(3, 0, 4), "malformed"),
        (lambda frames: flipped(frames[0], 0, 0xFF), "oversized"),
        *((lambda frames, at=at: flipped(frames[0], at), "forged") for at in (4, 9, 12, -20, -1)),
        *((lambda frames, order=order: b"".join(frames[at] for at in order), "forged") for order in (
            [1, 0], [0, 0], [0, 2, 1], [2],
        )),
    ],
)  # fmt: skip
def test_a_frame_that_is_oversized_changed_moved_repeated_or_left_out_closes_its_peer(
    broken: Callable[[list[bytes]], bytes], reason: str
) -> None:
    with echo_daemon() as daemon, honest_peer(daemon):
        peer = RawPeer(daemon.server.port)
        peer.send(broken([peer.frame(b"%d" % at, b"and its body" * 5) for at in range(3)]))
        expect_closed(daemon, peer, reason)


def test_frames_of_another_connection_close_their_peer() -> None:
    with echo_daemon() as daemon, honest_peer(daemon):
        first, second = RawPeer(daemon.server.port), RawPeer(daemon.server.port)
        second.send(first.frame(b"for the first"))
        expect_closed(daemon, second, "forged")
        first.key = type(first.key)(first.session.to_daemon)
        first.send(first.frame(b"goes on"))


def test_beginnings_of_large_frames_are_bounded_together() -> None:
    with echo_daemon(ChannelOptions(partial_bytes=2**20)) as daemon:
        peers = [RawPeer(daemon.server.port) for _ in range(3)]
        for nbytes, peer in zip((2**18, 2**18, 2**20), peers, strict=True):
            peer.send(peer.frame(b"begun", bytes(MAX_BODY_BYTES))[:nbytes])
        expect_closed(daemon, peers[2], "flood")


def test_a_large_frame_that_never_ends_is_closed_unless_it_waits_for_room() -> None:
    with echo_daemon(ChannelOptions(timeout_seconds=1.0, unread_bytes=2**20)) as daemon:
        peer, waiting = RawPeer(daemon.server.port), RawPeer(daemon.server.port)
        daemon.pause()
        for _ in range(2):
            waiting.send(waiting.frame(b"whole", bytes(MAX_BODY_BYTES)))
        peer.send(peer.frame(b"slow", bytes(MAX_BODY_BYTES))[:50_000])
        assert is_closed(peer.sock)
        until(lambda: closed(daemon, "slow_frame") == 1, DEADLINE_SECONDS, lambda: daemon.server.counters())
        daemon.resume()
        until(lambda: daemon.received == 2, DEADLINE_SECONDS, daemon.closed)
        waiting.sock.close()


def test_a_flood_is_not_read_beyond_its_bound_and_delays_nobody() -> None:
    options = ChannelOptions(peer_unread_bytes=2**19, unread_bytes=2**22)
    with echo_daemon(options) as daemon, honest_peer(daemon) as honest:
        daemon.pause()
        floods = [RawPeer(daemon.server.port) for _ in range(3)]
        for peer, size, count in zip(floods, (0, 1000, 500_000), (20_000, 5000, 10), strict=True):
            fill(peer.sock, b"".join(peer.frame(b"flood", bytes(size)) for _ in range(count)))
            unread = daemon.server.counters().unread_bytes
            assert unread <= options.unread_bytes + 5 * 2**15
        assert unread > 2**19
        # Each is at its bound; the honest peer's frames wait in its own queue and are received next.
        daemon.resume()
        honest.goes_on()
        for peer in floods:
            peer.sock.close()


def test_a_peer_that_never_reads_is_closed() -> None:
    options = ChannelOptions(peer_queued_bytes=2**21)
    with echo_daemon(options) as daemon, honest_peer(daemon) as honest:
        deaf = RawPeer(daemon.server.port)
        until(lambda: len(daemon.events) == 2, DEADLINE_SECONDS)
        number = max(event.peer for event in daemon.events)
        for _ in range(40):
            daemon.server.send([number], b"more", bytes(MAX_BODY_BYTES))
        until(lambda: closed(daemon, "slow_reader") == 1, DEADLINE_SECONDS, lambda: daemon.server.counters())
        until(lambda: daemon.server.counters().queued_bytes < 2**20, DEADLINE_SECONDS)
        until(lambda: daemon.closed() == [Closed(number, "slow_reader")], DEADLINE_SECONDS, daemon.closed)
        honest.goes_on()
        deaf.sock.close()


def test_a_peer_that_stops_reading_is_closed_after_the_timeout() -> None:
    with echo_daemon(ChannelOptions(timeout_seconds=3.0)) as daemon, honest_peer(daemon):
        deaf = RawPeer(daemon.server.port, receive_buffer_bytes=4096)
        until(lambda: len(daemon.events) == 2, DEADLINE_SECONDS)
        number = max(event.peer for event in daemon.events)
        for _ in range(32):  # more than the kernel's own buffers take
            daemon.server.send([number], b"more", bytes(MAX_BODY_BYTES))
        until(lambda: closed(daemon, "stalled") == 1, DEADLINE_SECONDS, lambda: daemon.server.counters())
        deaf.sock.close()


def test_one_rank_more_than_the_bound_is_refused() -> None:
    with echo_daemon(ChannelOptions(max_peers=2)) as daemon:
        where = ("127.0.0.1", daemon.server.port, CREDENTIALS, 10.0)
        peers = [ChannelClient.connect(*where) for _ in range(2)]
        with pytest.raises(ControlError, match="too many connections"):
            ChannelClient.connect(*where)
        assert daemon.server.counters().refused == {"too_many_peers": 1}
        peers.pop().close()
        until(lambda: daemon.server.counters().peers == 1, DEADLINE_SECONDS)
        until(lambda: len(daemon.closed()) == 1, DEADLINE_SECONDS)
        round_trip(ChannelClient.connect(*where), b"in", b"")


OLD, NEW = b"old key of 32 bytes.............", b"new key of 32 bytes............."


def test_a_removed_key_closes_its_connections_and_the_new_one_connects(tmp_path: Path) -> None:
    of_daemon, of_rank = tmp_path / "daemon", tmp_path / "rank"
    of_daemon.write_bytes(OLD + b"\n" + NEW)
    of_rank.write_bytes(OLD + b"\n" + NEW)
    credentials = ChannelCredentials(KeyFile(of_rank, "secret_file"))
    with echo_daemon(credentials=ChannelCredentials(KeyFile(of_daemon, "secret_file"))) as daemon:
        with honest_peer(daemon, ChannelCredentials(NEW)):
            old = ChannelClient.connect("127.0.0.1", daemon.server.port, credentials, DEADLINE_SECONDS)
            round_trip(old, b"before", b"")
            for path in (of_rank, of_daemon):
                new = path.with_suffix(".new")
                new.write_bytes(NEW)
                os.replace(new, path)
            with pytest.raises(ControlError, match="key_removed"):
                until(lambda: old.receive(1.0) is not None, DEADLINE_SECONDS)
        assert closed(daemon, "key_removed") == 1
        until(lambda: credentials.secret.keys() == (NEW,), DEADLINE_SECONDS)  # type: ignore[union-attr]
        round_trip(ChannelClient.connect("127.0.0.1", daemon.server.port, credentials, DEADLINE_SECONDS), b"in", b"")
        with pytest.raises(ControlError, match="secret"):
            ChannelClient.connect("127.0.0.1", daemon.server.port, ChannelCredentials(OLD), DEADLINE_SECONDS)


def test_a_body_for_many_peers_counts_and_is_kept_once() -> None:
    total = OutputTotal()
    outputs = [PeerOutput(FrameKey(bytes([at]) * 32), total) for at in range(200)]
    tracemalloc.start()
    payload = SealedPayload(b"chunk", bytes(2**20))
    for output in outputs:
        output.add(payload)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # What is counted for a queued frame covers what it really takes.
    assert held <= total.nbytes == payload.nbytes + 200 * EVENT_BYTES
    assert {output.nbytes for output in outputs} == {payload.nbytes + EVENT_BYTES}
    for output in outputs[1:]:
        output.clear()
    assert total.nbytes == payload.nbytes + EVENT_BYTES
    outputs[0].clear()
    assert total.nbytes == 0
