"""The memory of all connections together stays within the bound that the options state, whatever is sent to them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.daemon.channel_events import ChannelOptions
from flexd.control.protocol.handshake import NONCE_BYTES, OWN, encode_hello
from flexd.control.protocol.wire import MAX_BODY_BYTES
from tests.support.channel import CREDENTIALS, DEADLINE_SECONDS, RawPeer, raw_connection
from tests.support.repository import ROOT, child_environment
from tests.support.until import until

OPTIONS = ChannelOptions(
    max_unproven=100, handshake_seconds=30.0, handshake_grace_seconds=0.05, max_peers=40,
    peer_unread_bytes=2**20, unread_bytes=2**23, partial_bytes=2**25, peer_queued_bytes=2**22, queued_bytes=2**23,
)  # fmt: skip


class ServerProcess:
    def __init__(self, options: ChannelOptions) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.channel_process", json.dumps(dataclasses.asdict(options))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=child_environment(),
        )  # fmt: skip
        self.port = int(self._line())

    def command(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def report(self) -> tuple[int, dict[str, Any]]:
        self.command("report")
        most, counters = json.loads(self._line())
        return most, counters

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(DEADLINE_SECONDS) == 0

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server has ended"
        return line


@contextlib.contextmanager
def server_process() -> Iterator[ServerProcess]:
    process = ServerProcess(OPTIONS)
    try:
        yield process
    finally:
        process.stop()


def fill(sock: socket.socket, data: bytes) -> int:
    """Send as much as is accepted without a pause of 50 ms, and return the number of bytes."""
    sock.settimeout(0.05)
    sent = 0
    with contextlib.suppress(TimeoutError, ConnectionError):
        while sent < len(data):
            sent += sock.send(data[sent : sent + 2**18])
    return sent


def test_memory_stays_within_the_stated_bound() -> None:
    bound = OPTIONS.memory_bound_bytes()
    assert bound < 56 * 2**20
    with server_process() as server:
        honest = ChannelClient.connect("127.0.0.1", server.port, CREDENTIALS, DEADLINE_SECONDS)
        hello = encode_hello(OWN, bytes(NONCE_BYTES))
        unproven = [raw_connection(server.port) for _ in range(150)]
        for sock in unproven:
            with contextlib.suppress(OSError):
                sock.sendall(hello)
        # Nobody receives: large and small frames, and the beginnings of large ones.
        peers = [RawPeer(server.port) for _ in range(OPTIONS.max_peers - 1)]
        for at, peer in enumerate(peers):
            if at % 3 == 0:
                frames = b"".join(peer.frame(b"large", bytes(MAX_BODY_BYTES)) for _ in range(4))
            elif at % 3 == 1:
                frames = b"".join(peer.frame(b"") for _ in range(20_000))
            else:
                frames = peer.frame(b"begun", bytes(MAX_BODY_BYTES))[:-100]
            fill(peer.sock, frames)
        until(lambda: server.report()[1]["unread_bytes"] > OPTIONS.unread_bytes / 2, DEADLINE_SECONDS)
        before, counters = server.report()
        assert counters["unproven"] <= OPTIONS.max_unproven
        assert counters["peers"] == OPTIONS.max_peers
        # Then somebody receives, and none but the honest peer reads what it is sent.
        server.command("drain")
        honest.send(b"ping")
        until(lambda: honest.receive(1.0), DEADLINE_SECONDS)
        for _ in range(6):
            server.command("send 5")
            deadline = time.monotonic() + DEADLINE_SECONDS
            for _ in range(5):
                frame = honest.receive(deadline - time.monotonic())
                assert frame is not None
                assert len(frame.body) == MAX_BODY_BYTES
        most, counters = server.report()
        assert before <= most <= bound, (before, most, bound, counters)
        assert counters["closed"].get("slow_reader", 0) >= 1
        for sock in (*unproven, *(peer.sock for peer in peers)):
            sock.close()
        honest.close()
