"""Everything that can be sent to the control port, at a live job: ranks step and take migrations meanwhile."""

from __future__ import annotations

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


class Attack:
    """Hostile connections; they stay open until ``close``."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socks: list[socket.socket] = []

    def send(self, data: bytes) -> None:
        """Send to a new connection; the daemon may close it before all is sent."""
        with contextlib.suppress(OSError):
            sock = raw_connection(self._port)
            self._socks.append(sock)
            sock.settimeout(0.05)
            sock.sendall(data)

    def prove(self) -> RawPeer:
        peer = RawPeer(self._port, SECRET)
        self._socks.append(peer.sock)
        peer.sock.settimeout(0.05)
        return peer

    def garbage(self) -> None:
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(2**20),
            (2).to_bytes(8, "little") + bytes(64),
            b"\x16\x03\x01" * 99,
        ):
            self.send(data)
        self.send(MAGIC + b"\0\xff\xff")
        self.send(encode_hello(Versions(900, 901), bytes(NONCE_BYTES)))
        self.send(HELLO + bytes(PROOF_BYTES))

    def recorded(self) -> None:
        self.send(b"".join(self.prove().sent))

    def slow(self, connections: int) -> None:
        for _ in range(connections):
            self.send(HELLO[:20])

    def broken_frames(self) -> None:
        for data in (HEAD.pack(2**32 - 1, 0, 5), HEAD.pack(3, 0, 4), HEAD.pack(10, 0, 10) + bytes(26)):
            peer = self.prove()
            with contextlib.suppress(OSError):
                peer.send(data)
        peer = self.prove()
        frames = [peer.frame(b"%d" % at) for at in range(2)]
        with contextlib.suppress(OSError):
            peer.send(frames[1] + frames[0])

    def hostile_ranks(self) -> None:
        """Send false messages, floods and half frames with the secret, and read nothing."""
        for messages in (
            [b"{}", b"\xff" * 1000, b'{"kind":"hello"}', b"[" * 60_000],
            [b"x"] * 5000,
            [b"y" * 2**16] * 160,
        ):
            peer = self.prove()
            with contextlib.suppress(OSError):
                for message in messages:
                    peer.send(peer.frame(message))
        peer = self.prove()
        with contextlib.suppress(OSError):
            peer.send(peer.frame(b"half", bytes(MAX_BODY_BYTES))[:500_000])

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


def test_no_step_waits_and_migrations_go_on(job: Callable[..., Any]) -> None:
    with job(RankLayout(2, 1)) as (hosted, ranks):
        attack = Attack(hosted.port)
        for number in range(2):
            for part in (attack.garbage, attack.recorded, attack.broken_frames, attack.hostile_ranks):
                part()
            attack.slow(100)
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
        attack.close()
