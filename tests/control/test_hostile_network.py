"""Everything that can be sent to the control port, at a live job: daemon and ranks are processes; none ends."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexd.control.daemon.channel_events import ChannelOptions
from flexd.control.protocol.frames import HEAD, MAX_BODY_BYTES
from flexd.control.protocol.handshake import MAGIC, NONCE_BYTES, OWN, PROOF_BYTES, Versions, encode_hello
from tests.support.channel import RawPeer, raw_connection
from tests.support.ranks_in_threads import SECRET
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
            [b"{}", b"\xff" * 1000, b'{"kind":"hello"}', b"[" * 100_000],
            [b"x"] * 5000,
            [b"y" * 2**18] * 40,
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("rounds", "connections"), [(2, 100), pytest.param(5, 2000, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_no_process_ends_and_no_step_waits(
    start: Callable[..., Any], tmp_path: Path, rounds: int, connections: int
) -> None:
    needed = rounds * (connections + 40) + 500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        pytest.skip(f"the limit of open files is {hard}: {needed} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    daemon = start("daemon_process", 0, tmp_path / "state", 1, 50, 5.0)
    until(lambda: daemon.lines, 60)
    port = daemon.lines[0]
    seconds = 5 if rounds == 2 else 40
    ranks = [start("rank_process", port, tmp_path / "store", rank, 2, "a1", seconds) for rank in range(2)]
    until(lambda: daemon.events("channel"), 60, "no migration before the attack")
    before, committed = daemon.resident_bytes(), len(daemon.events("channel"))
    attack = Attack(port)
    most = 0
    for _ in range(rounds):
        for part in (attack.garbage, attack.recorded, attack.broken_frames, attack.hostile_ranks):
            part()
            most = max(most, daemon.resident_bytes())
        attack.slow(connections)
        # Ranks step and apply chunks meanwhile: one more target is reached by both.
        done = len(daemon.events("channel"))
        until(
            lambda done=done: len(daemon.events("channel")) > done or ranks[0].lines, 60, "no migration in the attack"
        )
        most = max(most, daemon.resident_bytes())
    assert len(daemon.events("channel")) > committed
    assert most - before <= ChannelOptions().memory_bound_bytes()
    until(lambda: all(rank.lines for rank in ranks), 90, "the ranks do not end")
    counted = daemon.events("channel")[-1]
    attack.close()
    assert daemon.process.poll() is None
    assert [rank.process.wait(20) for rank in ranks] == [0, 0]
    first, second = (rank.lines[0] for rank in ranks)
    assert first["history"] == second["history"]
    assert first["steps"] == second["steps"] > 100
    assert {"garbage", "oversized", "version", "wrong_secret"} <= set(counted["refused"]), counted
    assert {"forged", "oversized", "malformed"} <= set(counted["closed"]), counted
