"""A body that is queued for many peers is kept and counted once."""

from __future__ import annotations

import tracemalloc

from flexd.control.daemon.channel_events import EVENT_BYTES
from flexd.control.daemon.channel_peer import OutputTotal, PeerOutput
from flexd.control.protocol.frames import FrameKey, SealedPayload


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
