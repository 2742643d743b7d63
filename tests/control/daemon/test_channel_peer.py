"""Peers that have proven the secret and then misbehave: each is bounded or closed, counted, and the others go on."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.daemon.channel_events import EVENT_BYTES, ChannelOptions, Closed
from flexd.control.daemon.channel_peer import OutputTotal, PeerOutput
from flexd.control.protocol.network import ChannelCredentials
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
    DEADLINE_SECONDS,
    EchoDaemon,
    RawPeer,
    echo_daemon,
    honest_peer,
    is_closed,
    round_trip,
)
from tests.support.until import until


def closed(daemon: EchoDaemon, reason: str) -> int:
    return daemon.server.counters().closed.get(reason, 0)


def expect_closed(daemon: EchoDaemon, peer: RawPeer, reason: str) -> None:
    assert is_closed(peer.sock)
    until(lambda: closed(daemon, reason) == 1, DEADLINE_SECONDS, lambda: daemon.server.counters())
    until(lambda: [event.reason for event in daemon.closed()] == [reason], DEADLINE_SECONDS, daemon.closed)


@pytest.mark.parametrize(
    ("length", "message", "reason"),
    [
        (MAX_BODY_BYTES + 1, 0, "oversized"),
        (MAX_MESSAGE_BYTES + 1, MAX_MESSAGE_BYTES + 1, "oversized"),
        (2**32 - 1, 0, "oversized"),
        (3, 4, "malformed"),
    ],
)
def test_an_oversized_frame_closes_its_peer(length: int, message: int, reason: str) -> None:
    with echo_daemon() as daemon, honest_peer(daemon):
        peer = RawPeer(daemon.server.port)
        peer.send(HEAD.pack(length, 0, message))
        expect_closed(daemon, peer, reason)


@pytest.mark.parametrize("at", [0, 4, 8, 12, -20, -1])
def test_a_flipped_bit_closes_its_peer(at: int) -> None:
    with echo_daemon() as daemon, honest_peer(daemon):
        peer = RawPeer(daemon.server.port)
        frame = bytearray(peer.frame(b"a message", b"and its body" * 5))
        frame[at] ^= 1 if at else 0xFF
        peer.send(bytes(frame))
        assert is_closed(peer.sock)
        until(lambda: len(daemon.closed()) == 1, DEADLINE_SECONDS)
        assert daemon.closed()[0].reason in {"forged", "oversized", "malformed"}


@pytest.mark.parametrize("order", [[1, 0], [0, 0], [0, 2, 1], [2]])
def test_frames_moved_repeated_or_left_out_close_their_peer(order: list[int]) -> None:
    with echo_daemon() as daemon, honest_peer(daemon):
        peer = RawPeer(daemon.server.port)
        frames = [peer.frame(b"%d" % at) for at in range(3)]
        peer.send(b"".join(frames[at] for at in order))
        expect_closed(daemon, peer, "forged")


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
        frames = [b"".join(peer.frame(b"flood", bytes(size)) for _ in range(n)) for peer, (size, n) in zip(
            floods, [(0, 20_000), (1000, 5000), (500_000, 10)], strict=True)]  # fmt: skip
        sent = [0, 0, 0]
        for peer in floods:
            peer.sock.setblocking(False)

        def push() -> bool:
            progress = False
            for at, peer in enumerate(floods):
                try:
                    count = peer.sock.send(frames[at][sent[at] : sent[at] + 2**18])
                except BlockingIOError:
                    continue
                sent[at] += count
                progress |= count > 0
            return progress

        quiet = 0
        while quiet < 10:
            quiet = 0 if push() else quiet + 1
            counters = daemon.server.counters()
            assert counters.unread_bytes <= options.unread_bytes + 5 * 2**15, counters
            time.sleep(0.02)
        assert counters.unread_bytes > 2**19
        # Each is at its bound; the honest peer's frames wait in its own queue and are received next.
        daemon.resume()
        honest.goes_on()
        for at, peer in enumerate(floods):
            until(lambda: push() or sent[at] == len(frames[at]) or is_closed(peer.sock), DEADLINE_SECONDS)  # noqa: B023
        assert {event.reason for event in daemon.closed()} <= {"slow_reader", "stalled", "disconnected"}
        for peer in floods:
            peer.sock.close()


def test_a_peer_that_never_reads_is_closed() -> None:
    options = ChannelOptions(peer_queued_bytes=2**21)
    with echo_daemon(options) as daemon, honest_peer(daemon) as honest:
        deaf = RawPeer(daemon.server.port)
        honest_number = 1
        body = bytes(MAX_BODY_BYTES)
        until(lambda: len(daemon.events) == 2, DEADLINE_SECONDS)
        number = max(event.peer for event in daemon.events)
        assert number != honest_number
        for _ in range(40):
            daemon.server.send([number], b"more", body)
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
        credentials = ChannelCredentials(b"0123456789abcdef0123456789abcdef")
        peers = [ChannelClient.connect("127.0.0.1", daemon.server.port, credentials, 10) for _ in range(2)]
        with pytest.raises(ControlError, match="too many connections"):
            ChannelClient.connect("127.0.0.1", daemon.server.port, credentials, 10)
        assert daemon.server.counters().refused == {"too_many_peers": 1}
        peers.pop().close()
        until(lambda: daemon.server.counters().peers == 1, DEADLINE_SECONDS)
        until(lambda: len(daemon.closed()) == 1, DEADLINE_SECONDS)
        round_trip(ChannelClient.connect("127.0.0.1", daemon.server.port, credentials, 10), b"in", b"")


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
