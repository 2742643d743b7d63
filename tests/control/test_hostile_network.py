"""Everything that can be sent to the control port, at a live job: ranks step and take migrations meanwhile."""

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from flexd.control.protocol.handshake import MAGIC, NONCE_BYTES, OWN, PROOF_BYTES, Versions, encode_hello
from flexd.control.protocol.wire import HEAD, MAX_BODY_BYTES
from flexd.core.placement import RankLayout
from tests.support.channel import RawPeer, raw_connection
from tests.support.ranks_in_threads import SECRET, committed, same_content, target
from tests.support.until import until

HELLO = encode_hello(OWN, bytes(NONCE_BYTES))


UNPROVEN = (
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(2**20),
    (2).to_bytes(8, "little") + bytes(64),
    b"\x16\x03\x01" * 99,
    MAGIC + b"\0\xff\xff",
    encode_hello(Versions(900, 901), bytes(NONCE_BYTES)),
    HELLO + bytes(PROOF_BYTES),
    *([HELLO[:20]] * 100),
)
PROVEN: tuple[Callable[[RawPeer], bytes], ...] = (
    lambda peer: HEAD.pack(2**32 - 1, 0, 5),
    lambda peer: HEAD.pack(3, 0, 4),
    lambda peer: HEAD.pack(10, 0, 10) + bytes(26),
    lambda peer: b"".join(reversed([peer.frame(b"0"), peer.frame(b"1")])),
    lambda peer: b"".join(map(peer.frame, [b"{}", b"\xff" * 1000, b'{"kind":"hello"}', b"[" * 60_000])),
    lambda peer: b"".join(map(peer.frame, [b"x"] * 5000)),
    lambda peer: b"".join(map(peer.frame, [b"y" * 2**16] * 160)),
    lambda peer: peer.frame(b"half", bytes(MAX_BODY_BYTES))[:500_000],
)


def attack(port: int) -> list[socket.socket]:
    """Send each of these on a connection of its own, and a recorded handshake; read nothing and leave all open."""
    peers = [RawPeer(port, SECRET) for _ in range(1 + len(PROVEN))]
    sent = [*UNPROVEN, b"".join(peers[0].sent), *(make(peer) for make, peer in zip(PROVEN, peers[1:], strict=True))]
    sockets = [*(raw_connection(port) for _ in range(1 + len(UNPROVEN))), *(peer.sock for peer in peers[1:])]
    for sock, data in zip(sockets, sent, strict=True):
        sock.settimeout(0.1)
        # The daemon may close it before all is sent.
        with contextlib.suppress(OSError):
            sock.sendall(data)
    return [*sockets, peers[0].sock]


def test_no_step_waits_and_migrations_go_on(job: Callable[..., Any]) -> None:
    with job(RankLayout(2, 1)) as (hosted, ranks):
        opened: list[socket.socket] = []
        for number in range(2):
            opened += attack(hosted.port)
            steps = ranks.steps
            committed(hosted.coordinator, ranks, f"p{number}", target(number), 50)
            assert ranks.steps > steps
        assert same_content(ranks.history)
        refused, closed = {"garbage", "oversized", "version", "wrong_secret"}, {"forged", "oversized", "malformed"}
        counters = hosted.coordinator.channel_counters
        until(lambda: refused <= set(counters().refused) and closed <= set(counters().closed), what=counters)
        until(lambda: hosted.coordinator.status().refused_messages["malformed"])
        status = hosted.coordinator.status()
        assert (status.epochs, status.digest_mismatches) == (1, 0), "no rank was disturbed"
        for sock in opened:
            sock.close()
