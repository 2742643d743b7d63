"""Connections that prove nothing: each is refused and counted by its reason, and the ranks' own go on meanwhile."""

from __future__ import annotations

import contextlib

import pytest

from flexd.control.daemon.channel_events import REFUSED_REASONS, ChannelOptions
from flexd.control.protocol.handshake import (
    MAGIC,
    MAX_CLIENT_BYTES,
    MAX_FIELDS_BYTES,
    NONCE_BYTES,
    OWN,
    PROOF_BYTES,
    Versions,
    encode_hello,
)
from tests.support.channel import (
    DEADLINE_SECONDS,
    EchoDaemon,
    RawPeer,
    echo_daemon,
    honest_peer,
    is_closed,
    raw_connection,
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
