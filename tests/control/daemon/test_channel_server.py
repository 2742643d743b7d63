"""Unread events are received in turns, and the memory of all connections stays within its bounds."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.daemon.channel_events import (
    EVENT_BYTES,
    PEER_SHARE_BYTES,
    ChannelOptions,
    Closed,
    Received,
    UnreadEvents,
)
from flexd.control.protocol.handshake import NONCE_BYTES, OWN, encode_hello
from flexd.control.protocol.wire import MAX_BODY_BYTES
from tests.support.channel import CREDENTIALS, DEADLINE_SECONDS, RawPeer, fill, memory_bound_bytes, raw_connection
from tests.support.repository import ROOT, child_environment
from tests.support.until import until

QUEUES = ChannelOptions(peer_unread_bytes=100_000, unread_bytes=150_000)


class Unread(UnreadEvents):
    def __init__(self) -> None:
        self.rooms: list[None] = []
        super().__init__(QUEUES, lambda: self.rooms.append(None))


@pytest.fixture
def unread() -> Unread:
    return Unread()


def add(unread: Unread, peer: int, name: str, nbytes: int = 0) -> None:
    unread.add(Received(peer, name.encode(), b""), nbytes)


def names(unread: Unread, limit: int = 100) -> list[str]:
    return [event.message.decode() for event in unread.receive(limit, 0) if isinstance(event, Received)]


def test_peers_take_turns_and_each_ones_events_stay_in_order(unread: Unread) -> None:
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        add(unread, ord(name[0]), name)
    assert unread.peers == 3
    assert names(unread, 4) == ["a1", "b1", "c1", "a2"]
    add(unread, ord("b"), "b2")
    assert names(unread) == ["c2", "a3", "b2"]
    assert (unread.peers, unread.nbytes) == (0, 0)


def test_a_peer_is_read_up_to_its_bound_and_again_after_a_receive(unread: Unread) -> None:
    while unread.has_room(1, 20_000):
        add(unread, 1, "x", 20_000)
    assert 100_000 <= unread.nbytes < 120_000 + 6 * EVENT_BYTES
    assert unread.has_room(2, 20_000)
    assert len(unread.rooms) == 0
    names(unread, 3)
    assert len(unread.rooms) == 1
    assert unread.has_room(2, 30_000), "the next in turn"
    names(unread)
    assert len(unread.rooms) == 1


def test_each_peer_keeps_its_own_share_when_the_total_is_used_up(unread: Unread) -> None:
    for peer in (1, 2):
        add(unread, peer, "x", 95_000)
    assert not unread.has_room(1, 1)
    assert not unread.has_room(3, PEER_SHARE_BYTES + 1)
    assert unread.has_room(3, PEER_SHARE_BYTES)
    add(unread, 3, "x", PEER_SHARE_BYTES - EVENT_BYTES)
    assert not unread.has_room(3, 1)


def test_a_frame_beyond_the_bound_of_all_gets_in_alone(unread: Unread) -> None:
    assert unread.has_room(3, 200_000)
    add(unread, 1, "x", PEER_SHARE_BYTES)
    assert not unread.has_room(3, 200_000)


def test_small_frames_do_not_starve_a_large_one(unread: Unread) -> None:
    """Whoever is read first after each receive: what is freed stays free until the frame that waits longest fits."""
    small = range(1, 11)
    for peer in small:
        add(unread, peer, "x", 30_000)
    assert not unread.has_room(99, 120_000), "the large frame"
    for _ in small:
        names(unread, 1)
        if unread.has_room(99, 120_000):
            break
        for peer in small:
            if unread.has_room(peer, 30_000):
                add(unread, peer, "x", 30_000)
            assert unread.has_room(peer + 20, PEER_SHARE_BYTES), "its own share"
    assert unread.has_room(99, 120_000)
    add(unread, 99, "large", 120_000)
    unread.add(Closed(1, "disconnected"))
    assert "large" in names(unread)
    assert unread.has_room(2, 30_000), "the next in turn"


def test_a_receive_waits_for_an_event_a_wake_or_its_timeout(unread: Unread) -> None:
    assert unread.receive(1, 0.01) == []
    unread.wake()
    assert unread.receive(1, 60) == []
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(unread.receive(1, 60)))
    thread.start()
    unread.add(Closed(1, "disconnected"))
    until(lambda: found == [Closed(1, "disconnected")])
    thread.join()


OPTIONS = ChannelOptions(
    max_unproven=100, handshake_seconds=30.0, handshake_grace_seconds=0.05, max_peers=40,
    peer_unread_bytes=2**20, unread_bytes=2**23, partial_bytes=2**25, peer_queued_bytes=2**22, queued_bytes=2**23,
)  # fmt: skip


class ServerProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.port = int(self._line())

    def command(self, text: str) -> None:
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def report(self) -> tuple[int, dict[str, Any]]:
        self.command("report")
        most, counters = json.loads(self._line())
        return most, counters

    def _line(self) -> str:
        line = self._process.stdout.readline()
        assert line, "the server has ended"
        return line


@contextlib.contextmanager
def server_process() -> Iterator[ServerProcess]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.channel_process", json.dumps(dataclasses.asdict(OPTIONS))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=child_environment(),
    ) as process:  # fmt: skip
        yield ServerProcess(process)
    assert process.returncode == 0


def test_memory_stays_within_the_stated_bound() -> None:
    bound = memory_bound_bytes(OPTIONS)
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
                frames = b"".join(peer.frame(b"") for _ in range(5_000))
            else:
                frames = peer.frame(b"begun", bytes(MAX_BODY_BYTES))[:-100]
            fill(peer.sock, frames)
        until(lambda: server.report()[1]["unread_bytes"] > OPTIONS.unread_bytes / 2)
        before, counters = server.report()
        assert counters["unproven"] <= OPTIONS.max_unproven
        assert counters["peers"] == OPTIONS.max_peers
        # Then somebody receives, and none but the honest peer reads what it is sent.
        server.command("drain")
        honest.send(b"ping")
        until(lambda: honest.receive(1.0))
        for _ in range(6):
            server.command("send 5")
            bodies = [len(frame.body) for _ in range(5) if (frame := honest.receive(60.0)) is not None]
            assert bodies == [MAX_BODY_BYTES] * 5
        most, counters = server.report()
        assert before <= most <= bound, (before, most, bound, counters)
        assert counters["closed"].get("slow_reader", 0) >= 1
        for sock in (*unproven, *(peer.sock for peer in peers)):
            sock.close()
        honest.close()
