"""Queued frames are sent in order in whatever pieces the socket accepts, and shared bytes count once."""

from __future__ import annotations

import socket
import tracemalloc
from collections.abc import Iterator

import pytest

from flexd.control.daemon.channel_types import EVENT_BYTES
from flexd.control.daemon.queued_output import OutputTotal, PeerOutput
from flexd.control.protocol.frames import FrameKey, FrameReader, SealedPayload

KEY = bytes(32)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for sock in (left, right):
        sock.setblocking(False)
    yield left, right
    left.close()
    right.close()


def test_frames_arrive_whole_and_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    total = OutputTotal()
    output, reader = PeerOutput(FrameKey(KEY), total), FrameReader(FrameKey(KEY))
    sent = [(b"%d" % at, bytes(at * 1500)) for at in range(40)]
    for message, body in sent:
        output.add(SealedPayload(message, body))
    found: list[tuple[bytes, bytes]] = []
    rounds = 0
    while len(found) < len(sent):
        rounds += 1
        output.flush(pair[0])
        target = reader.target
        if target:
            reader.advance(pair[1].recv_into(target))
        else:
            reader.feed(pair[1].recv(1000))
        while (each := reader.next_frame()) is not None:
            found.append((each[1].message, bytes(each[1].body)))
        if reader.wanted:
            reader.allocate()
    assert found == sent
    assert rounds > 40
    assert (output.nbytes, total.nbytes, bool(output)) == (0, 0, False)


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


def test_progress_is_when_a_byte_was_accepted(pair: tuple[socket.socket, socket.socket]) -> None:
    output = PeerOutput(FrameKey(KEY), OutputTotal())
    output.add(SealedPayload(b"a", bytes(2**20)))
    assert output.flush(pair[0]) > 0
    stuck = output.progress_at
    assert output.flush(pair[0]) == 0
    assert output.progress_at == stuck
    pair[1].recv(2**20)
    assert output.flush(pair[0]) > 0
    assert output.progress_at >= stuck
